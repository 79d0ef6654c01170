"""Every chunk that one device sends to another in an iteration, in the one order that all devices follow."""

from __future__ import annotations

from typing import NamedTuple

from spindle_cli.account.edges import edge_bytes
from spindle_cli.account.rows import Layout, route
from spindle_cli.account.types import Edge
from spindle_cli.plan.types import Plan
from spindle_cli.program.types import Transfer


class _Step(NamedTuple):
    """An edge in one direction; steps sort by when they happen: `sender` and `receiver` are positions in that
    phase's order.
    """

    is_gradient: bool
    sender: int
    receiver: int
    edge: Edge


def plan_transfers(
    plan: Plan, layouts: tuple[Layout, ...], order: tuple[int, ...], edges: tuple[Edge, ...]
) -> tuple[Transfer, ...]:
    """All transfers of an iteration, `key` ascending: activations by the order of their producer, then of
    their consumer; then gradients, by the reverse order of their consumer, then of their producer.

    A sender has thus run everything that comes before its transfer, and posts are possible in the order of
    `key` everywhere.
    """
    position = {index: place for place, index in enumerate(order)}
    last = len(order)
    steps = [_Step(False, position[edge.producer], position[edge.consumer], edge) for edge in edges]
    steps += [
        _Step(True, last - position[edge.consumer], last - position[edge.producer], edge) for edge in edges
    ]
    steps.sort()

    transfers: list[Transfer] = []
    for step in steps:
        edge = step.edge
        source, destination = layouts[edge.producer], layouts[edge.consumer]
        if source == destination:
            continue  # every device keeps its own rows
        if step.is_gradient:
            source, destination = destination, source
        whole_bytes = edge_bytes(plan, edge)
        for chunk in route(source, destination):
            if chunk.source == chunk.destination:
                continue
            transfers.append(
                Transfer(
                    key=len(transfers),
                    producer=edge.producer,
                    consumer=edge.consumer,
                    source=chunk.source,
                    destination=chunk.destination,
                    first=chunk.first,
                    last=chunk.last,
                    is_gradient=step.is_gradient,
                    num_bytes=whole_bytes * (chunk.last - chunk.first) // source.batch_size,
                )
            )
    return tuple(transfers)
