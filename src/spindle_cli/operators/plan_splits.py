"""How a plan's slices split the layers of a workload by tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spindle_cli.errors import InputError
from spindle_cli.operators.tensor_parallel import LayerSplit, describe_ways, layer_split
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.workload.graph import Op, TaskGraph, WorkloadGraph
from spindle_cli.workload.parameters import ParameterTable


@dataclass(frozen=True)
class PlanSplits:
    """The splits of all ops of slices with tp > 1: by index in `plan.every_slice` and op of the MetaOp."""

    by_op: Mapping[tuple[int, int], LayerSplit]

    def split_names(self, plan: Plan) -> dict[tuple[str, int], frozenset[str]]:
        """(MetaOp, op of it) -> the dotted names of its parameters that some slice splits."""
        names: dict[tuple[str, int], frozenset[str]] = {}
        for (index, position), split in self.by_op.items():
            key = (plan.every_slice[index].metaop, position)
            names[key] = names.get(key, frozenset()) | frozenset(split.dims)
        return names

    def split_parameters(self, plan: Plan, graph: WorkloadGraph, table: ParameterTable) -> frozenset[str]:
        """Canonical names of all parameters that some slice splits."""
        return frozenset(
            table.names[graph.by_name[metaop].task, dotted]
            for (metaop, _), names in self.split_names(plan).items()
            for dotted in names
        )


def plan_splits(plan: Plan, graph: WorkloadGraph, where: str, *, only_evaluated: bool = False) -> PlanSplits:
    """How every slice's ops are split.

    Args:
        where: the plan's file, for messages.
        only_evaluated: ops without a layer, on devices whose trained ops have a vocabulary split, need have
            nothing to split: each device then computes all of them.

    Raises:
        InputError: the plan splits a layer that cannot be split so many ways.
        WorkloadError: a tensor-parallel plan does not fit its layer.
    """
    splits: dict[tuple[int, int], LayerSplit] = {}
    for index, slice_ in enumerate(plan.every_slice):
        if slice_.tp == 1:
            continue
        metaop = graph.by_name[slice_.metaop]
        task = graph.tasks[metaop.task]
        for position in range(*slice_.ops):
            op = task.ops[metaop.ops[position]]
            split = layer_split(graph.workload, task, op, slice_.tp)
            if split is None and only_evaluated and op.target is None:
                split = LayerSplit(slice_.tp, {}, (), ())
            if split is None:
                raise _refusal(where, slice_, graph, task, op)
            splits[index, position] = split
    return PlanSplits(splits)


def _refusal(where: str, slice_: Slice, graph: WorkloadGraph, task: TaskGraph, op: Op) -> InputError:
    return InputError(
        f"{where}: {slice_.label} is split {slice_.tp} ways by tensor parallelism, but its layers cannot be: "
        f"{describe_ways(graph.workload, task, op)}",
        hint="Give the layer's class a plan in Workload.tp_plans, or plan from a profile without tp > 1.",
    )
