"""Ops that the search has put on few devices although what they take lies on many: spread out where that
makes the iteration shorter.

The search knows curves alone. A contrastive loss is mostly the same few kernels however many devices share
it, and its gathers come on top: its curve rises, so the search leaves it on one device. But then the features
of every other device come to that one, message by message, and their gradients go back. So for the finished
schedule those devices are tried that hold what an op takes, or some of them, with whole nodes first, since
gathers over few nodes are fast. What each would take, messages included, is estimated by itself; the best are
evaluated as part of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from spindle_cli.account.activations import (
    Layout,
    busiest_s,
    edge_bytes,
    edges_between,
    handed_over,
    layout_of,
)
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.assemble import exact_slices
from spindle_cli.plan.problem import Node, Problem
from spindle_cli.plan.schedule import Candidate, Placed, UnplacedSlice
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, measure
from spindle_cli.plan.slices import Slice, rows_of

# Whole plans evaluated, at most so many without a gain one after the other, of each slice so many; what is
# estimated to save less than this share of the iteration is not.
MOST_JUDGED = 8
MOST_IN_VAIN = 3
JUDGED_PER_SLICE = 2
WORTH_SPREADING = 0.001


@dataclass(frozen=True)
class _Input:
    """What a slice takes from another one: bytes of the whole batch."""

    layout: Layout
    num_bytes: int


@dataclass(frozen=True)
class _Choice:
    """A slice on other devices. `saved_s`: what that is estimated to save."""

    index: int
    slice_: Slice
    saved_s: float


def all_spread_out(problem: Problem, plans: Sequence[EvaluatedCandidate]) -> list[EvaluatedCandidate]:
    """Some plans once spread out, the best first, of equals as they were. At most what messages take is saved
    by that, so those that would be slower even without any stay as they are.

    Args:
        plans: the best first.
    """
    spread, least_s = list(plans), inf
    for number, evaluated in enumerate(plans):
        prediction = evaluated.prediction
        if prediction.iteration_s - prediction.transfer_s - prediction.processor_s <= least_s:
            spread[number] = spread_out(problem, evaluated)
        least_s = min(least_s, spread[number].prediction.iteration_s)
    return sorted(spread, key=EvaluatedCandidate.rank)


def spread_out(problem: Problem, evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Spread ops of a plan over the devices of their inputs; the plan as it was where nothing gains by it."""
    worth_s = WORTH_SPREADING * evaluated.prediction.iteration_s
    if evaluated.prediction.transfer_s < worth_s:
        return evaluated
    choices = [choice for choice in _choices(problem, evaluated.slices) if choice.saved_s >= worth_s]
    choices.sort(key=lambda choice: choice.saved_s)  # of each slice the best comes last
    # Side by side, one of two losses gains nothing by itself: all together, then one by one, there or back.
    trials = [{choice.index: choice.slice_ for choice in choices}] if choices else []
    trials += [{choice.index: choice.slice_} for choice in choices[::-1]]
    best, slices, in_vain = evaluated, evaluated.slices, 0
    for trial in trials[:MOST_JUDGED]:
        if in_vain == MOST_IN_VAIN:
            break
        changed = _changed(slices, trial)
        if changed == slices:
            changed = _changed(slices, {index: evaluated.slices[index] for index in trial})
        spread = _evaluated_again(problem, evaluated, changed)
        in_vain += 1
        if spread is not None and spread.rank() < best.rank():
            best, slices, in_vain = spread, changed, 0
    return best


def _changed(slices: tuple[Slice, ...], changed: Mapping[int, Slice]) -> tuple[Slice, ...]:
    return tuple(changed.get(index, slice_) for index, slice_ in enumerate(slices))


def _choices(problem: Problem, slices: Sequence[Slice]) -> Iterator[_Choice]:
    """For each slice that has a whole node's ops, the most promising devices among those of its inputs."""
    by_name = problem.profile.by_name
    node_of = {(node.metaop.name, node.first_op): node for node in problem.nodes}
    taken: dict[int, list[int]] = {}
    inputs: dict[int, list[_Input]] = {}
    for edge in edges_between(slices, by_name):
        producer = slices[edge.producer]
        layout = layout_of(producer, by_name)
        taken.setdefault(edge.consumer, []).append(edge.producer)
        inputs.setdefault(edge.consumer, []).append(_Input(layout, edge_bytes(producer, edge, by_name)))
    for index, producers in taken.items():
        slice_ = slices[index]
        node = node_of.get((slice_.metaop, slice_.ops[0]))
        if node is None or node.num_ops != slice_.num_ops or slice_.tp > 1:
            continue
        now_s = _seconds(problem, slice_, inputs[index])
        wider = {
            wider_slice.devices: _Choice(
                index, wider_slice, now_s - _seconds(problem, wider_slice, inputs[index])
            )
            for producer in producers
            for wider_slice in _wider(problem, node, slice_, slices[producer].devices)
        }
        yield from sorted(wider.values(), key=lambda choice: -choice.saved_s)[:JUDGED_PER_SLICE]


def _wider(problem: Problem, node: Node, slice_: Slice, held_by: Sequence[int]) -> Iterator[Slice]:
    """A slice on more devices, of those that hold an input of it: all, or some evenly apart."""
    node_of = problem.cluster.node_of
    by_node: dict[int, list[int]] = {}
    for device in held_by:
        by_node.setdefault(node_of[device], []).append(device)
    for point in node.metaop.curve:
        if point.tp > 1 or not slice_.dp < point.dp <= len(held_by) or len(held_by) % point.dp:
            continue
        every = len(held_by) // point.dp
        of_nodes = tuple(device for devices in list(by_node.values())[::every] for device in devices)
        for devices in dict.fromkeys((of_nodes, tuple(held_by[::every]))):
            if len(devices) == point.dp:
                rows = rows_of(node.metaop.batch_size, point.dp)
                yield slice_.model_copy(update={"devices": devices, "dp": point.dp, "rows": rows})


def _seconds(problem: Problem, slice_: Slice, inputs: Sequence[_Input]) -> float:
    """What both passes of a slice take, with the messages that bring its inputs and take their gradients
    back, as if nothing else were under way.
    """
    cluster, metaop = problem.cluster, problem.profile.by_name[slice_.metaop]
    point = problem.point_of(slice_)
    layout = layout_of(slice_, problem.profile.by_name)
    op_s = point.op_s + sum(problem.beyond.op_s(slice_, metaop, point.forward_s, point.backward_s))
    moves = ((taken.layout, layout, taken.num_bytes) for taken in inputs)
    return slice_.num_ops * op_s + 2 * moving_s(moves, cluster)


def _evaluated_again(
    problem: Problem, evaluated: EvaluatedCandidate, slices: Sequence[Slice]
) -> EvaluatedCandidate | None:
    """Slices in the order of a evaluated plan's, timed and evaluated anew; None if they do not fit the
    memory.
    """
    index = {
        (node.metaop.name, op): node.index
        for node in problem.nodes
        for op in range(node.first_op, node.first_op + node.num_ops)
    }
    pieces = tuple(
        UnplacedSlice(index[p.metaop, p.ops[0]], *p.ops, problem.point_of(p), p.start_s, p.end_s)
        for p in slices
    )
    candidate = Candidate(evaluated.strategy, pieces, after=evaluated.after)
    placed = Placed(candidate, tuple(slice_.devices for slice_ in slices))
    return measure(problem, evaluated.strategy, exact_slices(problem, placed), evaluated.after)


def moving_s(moves: Iterable[tuple[Layout, Layout, int]], cluster: Cluster) -> float:
    """Seconds that moves of batches between layouts take, were nothing else under way: until the busiest port
    is through with all, and all that was sent in parts is gathered.

    Args:
        moves: from, to, and the bytes of the whole batch.
    """
    over = [handed_over(source, destination, num_bytes, cluster) for source, destination, num_bytes in moves]
    return busiest_s((send for handed in over for send in handed.sends), cluster) + sum(
        handed.gather_s for handed in over
    )
