"""What a task that is only evaluated needs of what other tasks train: which op, which tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spindle_cli.workload.graph import MetaOp, TaskGraph, WorkloadGraph
from spindle_cli.workload.parameters import ParameterTable


@dataclass(frozen=True)
class NeededOp:
    """One op of the task.

    Attributes:
        metaop: that it is of, and its `position` in that.
        inputs: of the ops whose values it takes, their places among all of the task.
        tensors: the parameters and buffers, by canonical name, that ops of trained tasks use too.
        is_whole: it needs the whole batch.
    """

    metaop: str
    position: int
    inputs: tuple[int, ...]
    tensors: frozenset[str]
    is_whole: bool


@dataclass(frozen=True)
class NeededMetaOp:
    """A MetaOp of the task; `output_bytes`: that its last op hands on, for the whole batch."""

    name: str
    num_ops: int
    inputs: tuple[str, ...]
    inputs_of_every_op: tuple[str, ...]
    output_bytes: int
    inner_output_bytes: int


@dataclass(frozen=True)
class Needs:
    """What a whole task needs to be evaluated.

    Attributes:
        ops: in the order in which they run.
        held: the tensors that each op of a trained task uses, by MetaOp and position in it.
    """

    task: str
    batch_size: int
    metaops: tuple[NeededMetaOp, ...]
    ops: tuple[NeededOp, ...]
    held: dict[tuple[str, int], frozenset[str]]


def needs_of(graph: WorkloadGraph, name: str) -> Needs:
    """The needs of one of the tasks that are only evaluated."""
    own = graph.only_evaluated(name)
    task = own.tasks[name]
    table = names_of_all(graph)
    held = {
        (metaop.name, position): _tensors(table, graph.tasks[metaop.task], index)
        for metaop in graph.metaops
        for position, index in enumerate(metaop.ops)
    }
    trained = frozenset[str]().union(*held.values())
    places = {
        index: (metaop.name, position) for metaop in own.metaops for position, index in enumerate(metaop.ops)
    }
    ops = tuple(
        NeededOp(
            *places[op.index],
            inputs=tuple(dict.fromkeys(task.producer[value] for value in op.inputs)),
            tensors=_tensors(table, task, op.index) & trained,
            is_whole=op.coupled or op.talks,
        )
        for op in task.ops
    )
    metaops = tuple(_needed(task, metaop) for metaop in own.metaops)
    return Needs(name, task.task.batch_size, metaops, ops, held)


def names_of_all(graph: WorkloadGraph) -> ParameterTable:
    """The names of all parameters and buffers, with those of the tasks that are only evaluated behind the
    others'.
    """
    names = [task.name for task in graph.workload.evaluated if task.name in graph.evaluations]
    only = {name: graph.evaluations[name] for name in names}
    return ParameterTable.of(replace(graph, tasks={**graph.tasks, **only}))


def _tensors(table: ParameterTable, task: TaskGraph, index: int) -> frozenset[str]:
    op = task.ops[index]
    return frozenset(table.of_op(task.task.name, (*op.parameters, *op.buffers)))


def _needed(task: TaskGraph, metaop: MetaOp) -> NeededMetaOp:
    handed_on = [
        sum(task.values[value].num_bytes for value in task.ops[index].outputs) for index in metaop.ops
    ]
    return NeededMetaOp(
        metaop.name,
        len(metaop.ops),
        metaop.inputs,
        metaop.inputs_of_every_op,
        output_bytes=handed_on[-1],
        inner_output_bytes=handed_on[0],
    )
