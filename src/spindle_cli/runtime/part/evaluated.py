"""The tasks of a workload that are only evaluated: where they run, and what is held for them alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spindle_cli.operators.plan_splits import PlanSplits, plan_splits
from spindle_cli.plan.types import Plan
from spindle_cli.program.evaluated import place_evaluated
from spindle_cli.workload.evaluated.needs import names_of_all, needs_of
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.parameters import ParameterTable

# The parameter, the memory of a part of it, and [first, last) of each dimension; None: all of it.
InitialPart = tuple[str, torch.Tensor, tuple[tuple[int, int], ...] | None]


@dataclass(frozen=True)
class EvaluatedPart:
    """By what plan such a task runs, and how that splits its layers."""

    plan: Plan
    splits: PlanSplits


def evaluated_parts(plan: Plan, graph: WorkloadGraph) -> dict[str, EvaluatedPart]:
    """Where the tasks run that are only evaluated, by name. Parameters have to have their shapes.

    Raises:
        InputError: no device holds what one of their ops takes.
    """
    found: dict[str, EvaluatedPart] = {}
    for task in graph.workload.evaluated:
        own = place_evaluated(plan, needs_of(graph, task.name))
        where = f"the plan to evaluate {task.name!r} by"
        splits = plan_splits(own, graph.only_evaluated(task.name), where, only_evaluated=True)
        found[task.name] = EvaluatedPart(own, splits)
    return found


def initial_parts_of_evaluated(graph: WorkloadGraph, table: ParameterTable) -> dict[str, InitialPart]:
    """The parameters, as far as they are here, that only tasks use which are never trained."""
    found = names_of_all(graph).parameters.items()
    return {
        name: (name, parameter, None)
        for name, parameter in found
        if not (parameter.is_meta or table.users.get(name))
    }
