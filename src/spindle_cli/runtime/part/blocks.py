"""Which parameters the ops of a workload train or share out under a plan, and how, by canonical name."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from spindle_cli.account.groups import ParameterBlock
from spindle_cli.errors import InputError
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.plan.types import Plan
from spindle_cli.training.optimizing.groups import OptimizerGroups
from spindle_cli.workload.graph import ParameterTable, WorkloadGraph


def sharding_of(
    plan: Plan, graph: WorkloadGraph, table: ParameterTable, groups: OptimizerGroups
) -> dict[str, Sharding]:
    """By canonical name, what devices share out of each parameter beyond its optimizer state: of one with
    several keys, the least; nothing of what its optimizer steps whole, or what is
    gathered as rows or factors, and of what is not trained the parameters alone.
    """
    degrees: dict[str, set[Sharding]] = {}
    gathered = {matrix.parameter for metaop in plan.metaops for matrix in metaop.gathered}
    for metaop in graph.metaops:
        planned = plan.by_name[metaop.name]
        sharding = plan.sharding.get(planned.parameters or planned.name, Sharding.OPTIMIZER)
        for index in metaop.ops:
            for dotted in graph.tasks[metaop.task].ops[index].parameters:
                degrees.setdefault(table.names[metaop.task, dotted], set()).add(sharding)
    return {
        name: least
        for name, shardings in degrees.items()
        if (least := next(degree for degree in Sharding if degree in shardings)).is_fetched
        or table.is_trainable(name)
        if not table.is_trainable(name) or groups.treats_elements_alone(name)
        if name not in gathered
    }


def parameters_of_ops(
    graph: WorkloadGraph,
    table: ParameterTable,
    split: Mapping[tuple[str, int], Collection[str]],
    sharding: ShardingOf,
    gathered: Collection[str] = (),
) -> dict[tuple[str, int], tuple[ParameterBlock, ...]]:
    """The parameters of every op of every MetaOp that are trained or shared out; each is a block of its own,
    keyed by its name.

    Args:
        split: (MetaOp, op of it) -> dotted names of the parameters that tensor parallelism splits.
        sharding: by canonical name. `gathered`: of the matrices whose gradients are.
    """
    return {
        (metaop.name, position): tuple(
            ParameterBlock(
                name,
                0,
                table.num_bytes(name),
                dotted in split.get((metaop.name, position), ()),
                Sharding.NONE if name in gathered else sharding.get(name, Sharding.OPTIMIZER),
                is_trained=table.is_trainable(name),
                is_gathered=name in gathered,
            )
            for dotted in graph.tasks[metaop.task].ops[index].parameters
            if table.is_trainable(name := table.names[metaop.task, dotted]) or name in sharding
        )
        for metaop in graph.metaops
        for position, index in enumerate(metaop.ops)
    }


def gathered_names(
    plan: Plan, graph: WorkloadGraph, table: ParameterTable, accumulate: int
) -> frozenset[str]:
    """The matrices whose gradients a plan gathers as rows or factors.

    Args:
        accumulate: batches in a step, as the train settings say.

    Raises:
        InputError: the workload trains none of that name, or in other ops; or steps have other numbers of
            batches than the plan has room for.
    """
    said: dict[str, set[tuple[str, int]]] = {}
    for metaop in plan.metaops:
        for matrix in metaop.gathered:
            index = graph.by_name[metaop.name].ops[matrix.op]
            said.setdefault(matrix.parameter, set()).add((metaop.task, index))
    for name, ops in said.items():
        if name not in table.parameters or not table.is_trainable(name) or ops != set(table.users[name]):
            raise InputError(
                f"metaops: gathered: {name!r}: expected a trained matrix of the workload, in "
                "all ops that use it",
                hint="Profile the workload again, and plan again from that.",
            )
    if said and plan.accumulate != accumulate:
        raise InputError(
            f"accumulate: found {accumulate} in the train settings; the plan gathers gradients as rows or "
            f"factors of {plan.accumulate} batches in a step",
            hint="Profile the workload again, and plan again from that.",
        )
    return frozenset(said)
