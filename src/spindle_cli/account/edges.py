"""Which slice takes whose output, who holds which samples, and the one order in which all slices run."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise

from spindle_cli.account.rows import Layout
from spindle_cli.account.types import Edge, PlacedPlan
from spindle_cli.costs.memory import SliceShape, inner_bytes
from spindle_cli.profile.types import MetaOp


def slice_layouts(plan: PlacedPlan) -> tuple[Layout, ...]:
    """Who holds which samples, of each of `plan.slices`."""
    return tuple(_layout(piece, plan.by_name[piece.metaop]) for piece in plan.slices)


def _layout(piece: SliceShape, metaop: MetaOp) -> Layout:
    # An op that sums over its shares is never split by tensor parallelism as well.
    sums_shares = bool(metaop.batch_sums) and piece.dp > 1
    return Layout(piece.devices, piece.dp, piece.tp, metaop.batch_size, sums_shares)


def slice_edges(plan: PlacedPlan) -> tuple[Edge, ...]:
    """`edges_between` a plan's slices."""
    return edges_between(plan.slices, plan.by_name)


def edges_between(slices: Sequence[SliceShape], by_name: Mapping[str, MetaOp]) -> tuple[Edge, ...]:
    """Edges between slices, ordered by consumer, then producer.

    Inside a MetaOp from each slice to the next. Between MetaOps from the slice with the producer's last op to
    the slice with the consumer's first op; or to each of the consumer's slices, where every one of its ops
    takes that input.
    """
    pieces: dict[str, list[int]] = {name: [] for name in by_name}
    for index, piece in enumerate(slices):
        pieces[piece.metaop].append(index)
    for indices in pieces.values():
        indices.sort(key=lambda index: slices[index].ops)

    edges: list[Edge] = []
    for metaop in by_name.values():
        own = pieces[metaop.name]
        edges.extend(Edge(producer, consumer, inner=True) for producer, consumer in pairwise(own))
        for name in metaop.inputs:
            consumers = own if name in metaop.inputs_of_every_op else own[:1]
            edges.extend(
                Edge(producer, consumer, inner=False)
                for producer in pieces[name][-1:]
                for consumer in consumers
            )
    return tuple(sorted(edges, key=lambda edge: (edge.consumer, edge.producer)))


def edge_bytes(producer: SliceShape, edge: Edge, by_name: Mapping[str, MetaOp]) -> int:
    """Bytes that cross an edge from its producer for the whole batch, one way."""
    metaop = by_name[producer.metaop]
    return inner_bytes(metaop) if edge.inner else metaop.output_bytes


def execution_order(plan: PlacedPlan, edges: tuple[Edge, ...]) -> tuple[int, ...]:
    """Indices of the slices, producers first, otherwise by start, then wave, then place in the wave.

    Every device runs its slices in this order, so that all devices agree on it without asking each other.
    """
    consumers: dict[int, list[int]] = {}
    missing = [0] * len(plan.slices)
    for edge in edges:
        consumers.setdefault(edge.producer, []).append(edge.consumer)
        missing[edge.consumer] += 1
    ready = [(piece.start_s, index) for index, piece in enumerate(plan.slices) if not missing[index]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for consumer in consumers.get(index, ()):
            missing[consumer] -= 1
            if not missing[consumer]:
                heapq.heappush(ready, (plan.slices[consumer].start_s, consumer))
    assert len(order) == len(plan.slices), "the MetaGraph of a plan has no cycle, so its slices have none"
    return tuple(order)
