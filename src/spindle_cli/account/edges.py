"""Which slice takes whose output, who holds which samples, and the one order in which all passes run."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise

from spindle_cli.account.rows import Layout
from spindle_cli.account.types import Edge, Pass, PlacedPlan
from spindle_cli.costs.memory import SliceShape, inner_bytes
from spindle_cli.profile.types import MetaOp


def slice_layouts(plan: PlacedPlan) -> tuple[Layout, ...]:
    """Who holds which samples, of each of `plan.slices`."""
    return tuple(layout_of(piece, plan.by_name) for piece in plan.slices)


def layout_of(piece: SliceShape, by_name: Mapping[str, MetaOp]) -> Layout:
    """Who holds which samples of a slice."""
    metaop = by_name[piece.metaop]
    # An op that sums over its shares is never split by tensor parallelism as well.
    sums_shares = bool(metaop.batch_sums) and piece.dp > 1
    micro_batch = piece.micro_batch, piece.shares_of_batch // piece.dp
    return Layout(piece.devices, piece.dp, piece.tp, metaop.batch_size, sums_shares, micro_batch, piece.rows)


def slice_edges(plan: PlacedPlan) -> tuple[Edge, ...]:
    """`edges_between` a plan's slices."""
    return edges_between(plan.slices, plan.by_name)


def edges_between(slices: Sequence[SliceShape], by_name: Mapping[str, MetaOp]) -> tuple[Edge, ...]:
    """Edges between slices of the same micro-batch, ordered by consumer, then producer.

    Inside a MetaOp from each slice to the next. Between MetaOps from the slice with the producer's last op to
    the slice with the consumer's first op; or to each of the consumer's slices, where every one of its ops
    takes that input.
    """
    pieces: dict[tuple[str, int], list[int]] = {}
    for index, piece in enumerate(slices):
        pieces.setdefault((piece.metaop, piece.micro_batch), []).append(index)
    for indices in pieces.values():
        indices.sort(key=lambda index: slices[index].ops)

    edges: list[Edge] = []
    for (own_name, micro_batch), own in pieces.items():
        metaop = by_name[own_name]
        edges.extend(Edge(producer, consumer, inner=True) for producer, consumer in pairwise(own))
        for name in metaop.inputs:
            consumers = own if name in metaop.inputs_of_every_op else own[:1]
            edges.extend(
                Edge(producer, consumer, inner=False)
                for producer in pieces.get((name, micro_batch), ())[-1:]
                for consumer in consumers
            )
    return tuple(sorted(edges, key=lambda edge: (edge.consumer, edge.producer)))


def edge_bytes(producer: SliceShape, edge: Edge, by_name: Mapping[str, MetaOp]) -> int:
    """Bytes that cross an edge from its producer for the whole batch, one way."""
    metaop = by_name[producer.metaop]
    return inner_bytes(metaop) if edge.inner else metaop.output_bytes


def pass_order(plan: PlacedPlan, edges: Sequence[Edge]) -> tuple[Pass, ...]:
    """`order_passes` of a plan's slices."""
    return order_passes(plan.slices, edges)


def order_passes(slices: Sequence[SliceShape], edges: Sequence[Edge]) -> tuple[Pass, ...]:
    """Every slice's forward and backward pass, each behind those that it takes from, otherwise by start, then
    place in the plan. Where slices say nothing of their backward passes, all of them come in the end, in
    reverse.

    Every device runs its passes in this order, so that all devices agree on it without asking each other.
    """
    if all(piece.backward_start_s is None for piece in slices):
        forward = _sorted([piece.start_s for piece in slices], [(e.producer, e.consumer) for e in edges])
        there = [Pass(index, is_backward=False) for index in forward]
        return (*there, *(Pass(index, is_backward=True) for index in reversed(forward)))
    count = len(slices)
    starts = [piece.start_s for piece in slices]
    starts += [
        piece.start_s if piece.backward_start_s is None else piece.backward_start_s for piece in slices
    ]
    before = [(index, count + index) for index in range(count)]
    before += [(edge.producer, edge.consumer) for edge in edges]
    before += [(count + edge.consumer, count + edge.producer) for edge in edges]
    return tuple(Pass(number % count, number >= count) for number in _sorted(starts, before))


def backward_order(order: Sequence[Pass]) -> tuple[int, ...]:
    """Indices of slices in the order in which they run backward."""
    return tuple(piece for piece, is_backward in order if is_backward)


def _sorted(starts: Sequence[float], before: Sequence[tuple[int, int]]) -> list[int]:
    """0, 1, ... by their starts, of each pair in `before` the first before the second."""
    followers: dict[int, list[int]] = {}
    missing = [0] * len(starts)
    for first, second in before:
        followers.setdefault(first, []).append(second)
        missing[second] += 1
    ready = [(start, index) for index, start in enumerate(starts) if not missing[index]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for follower in followers.get(index, ()):
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (starts[follower], follower))
    assert len(order) == len(starts), "the MetaGraph of a plan has no cycle, so its passes have none"
    return order
