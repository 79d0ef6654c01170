"""Which values cross which edges: the program's slices joined with the traced workload's ops and values.

A program knows slices and edges; a traced workload knows ops and the values between them. What follows from
the two is the same on every rank, so both ends of a transfer agree on what it carries without asking each
other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from spindle_cli.account.activations import Layout
from spindle_cli.account.types import Edge
from spindle_cli.plan.types import Slice
from spindle_cli.program.types import Program
from spindle_cli.workload.graph import LossShares, Op, TaskGraph, ValueSpec, WorkloadGraph


@dataclass(frozen=True)
class WiredEdge:
    """An edge with the values that it carries, ordered by name; none where the consumer uses nothing of the
    producer. `differentiable`: of these, those that the consumer gives a gradient for. `may_lack`: names of
    those that it gives none for in some steps, as values decide.
    """

    edge: Edge
    values: tuple[ValueSpec, ...]
    differentiable: tuple[ValueSpec, ...]
    may_lack: frozenset[str] = frozenset()


@dataclass(frozen=True)
class WiredSlice:
    """A slice with its ops.

    Attributes:
        index: in `Program.slices`.
        layout: who holds which samples.
        task: the traced task that it belongs to.
        ops: of the slice, in execution order.
        incoming, outgoing: its edges, in the program's order.
    """

    index: int
    slice: Slice
    layout: Layout
    task: TaskGraph
    ops: tuple[Op, ...]
    incoming: tuple[WiredEdge, ...]
    outgoing: tuple[WiredEdge, ...]

    @cached_property
    def inputs(self) -> tuple[ValueSpec, ...]:
        """The values that the slice takes from others."""
        return tuple(value for wired in self.incoming for value in wired.values)

    @cached_property
    def outputs(self) -> tuple[ValueSpec, ...]:
        """The values that the slice hands to others, each once."""
        return tuple({value.name: value for wired in self.outgoing for value in wired.values}.values())

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Batch fields that its ops read, each once, and those that its loss counts."""
        counted = () if self.loss_shares is None else self.loss_shares.count_fields
        return tuple(dict.fromkeys([*(field for op in self.ops for field in op.fields), *counted]))

    @cached_property
    def loss_shares(self) -> LossShares | None:
        """Where it holds its task's loss: what its shares compute, if that is known."""
        return next((op.shares for op in self.ops if op.is_loss), None)


@dataclass(frozen=True)
class Wiring:
    """Every slice of a program, wired; `width`: the most values that any edge carries."""

    slices: tuple[WiredSlice, ...]
    edges: dict[tuple[int, int], WiredEdge]  # by (producer, consumer)

    @cached_property
    def width(self) -> int:
        """The most values that any edge carries; at least 1."""
        return max((len(wired.values) for wired in self.edges.values()), default=1) or 1


def wire(graph: WorkloadGraph, program: Program) -> Wiring:
    """Join a program with the traced workload that its plan was made for."""
    ops = tuple(_ops_of(graph, slice_) for slice_ in program.slices)
    edges = {(edge.producer, edge.consumer): _edge(graph, program, ops, edge) for edge in program.edges}
    incoming: dict[int, list[WiredEdge]] = {}
    outgoing: dict[int, list[WiredEdge]] = {}
    for wired in edges.values():
        incoming.setdefault(wired.edge.consumer, []).append(wired)
        outgoing.setdefault(wired.edge.producer, []).append(wired)
    slices = tuple(
        WiredSlice(
            index=index,
            slice=slice_,
            layout=program.layouts[index],
            task=graph.tasks[graph.by_name[slice_.metaop].task],
            ops=ops[index],
            incoming=tuple(incoming.get(index, ())),
            outgoing=tuple(outgoing.get(index, ())),
        )
        for index, slice_ in enumerate(program.slices)
    )
    _check_inputs_arrive(slices)
    return Wiring(slices, edges)


def _ops_of(graph: WorkloadGraph, slice_: Slice) -> tuple[Op, ...]:
    metaop = graph.by_name[slice_.metaop]
    task = graph.tasks[metaop.task]
    return tuple(task.ops[index] for index in metaop.ops[slice_.ops[0] : slice_.ops[1]])


def _edge(graph: WorkloadGraph, program: Program, ops: tuple[tuple[Op, ...], ...], edge: Edge) -> WiredEdge:
    task = graph.tasks[graph.by_name[program.slices[edge.producer].metaop].task]
    producers, consumers = ops[edge.producer], ops[edge.consumer]
    made = set(chain.from_iterable(op.outputs for op in producers))
    taken = set(chain.from_iterable(op.inputs for op in consumers))
    values = tuple(task.values[name] for name in sorted(made & taken))
    given = set(chain.from_iterable(op.gradients for op in consumers))
    always = set(chain.from_iterable(op.gradients for op in consumers if op.sees_gradients))
    differentiable = tuple(value for value in values if value.name in given)
    may_lack = frozenset(value.name for value in differentiable if value.name not in always)
    return WiredEdge(edge, values, differentiable, may_lack)


def _check_inputs_arrive(slices: tuple[WiredSlice, ...]) -> None:
    for wired in slices:
        arriving = [value.name for value in wired.inputs]
        made: set[str] = set()
        needed: set[str] = set()
        for op in wired.ops:
            needed |= set(op.inputs) - made
            made |= set(op.outputs)
        assert sorted(arriving) == sorted(needed), (
            f"slice {wired.slice.label} needs {sorted(needed)} but its edges carry {sorted(arriving)}"
        )
