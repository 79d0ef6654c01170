"""The critical chain of a plan: the slices that the end of its schedule waits for, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from spindle_cli.files.artifact import Model
from spindle_cli.plan.types import Plan, Slice

# Slices follow each other in ticks of the planner; a longer gap than this part of the schedule is idle time.
GAP_TOLERANCE = 1e-6


class Cause(StrEnum):
    """What a slice of the chain waits for."""

    START = "start"  # nothing: it is the first
    INPUT = "input"  # the output of the slice before it
    OPS = "ops"  # the ops before its own, of the same MetaOp
    DEVICE = "device"  # a device that the slice before it occupies


class Link(Model):
    """One slice of the critical chain, and why it did not start earlier.

    `idle_s`: seconds between the end of what it waits for and its start.
    """

    metaop: str
    ops: tuple[int, int]
    num_devices: int
    start_s: float
    end_s: float
    cause: Cause
    idle_s: float = 0.0


def critical_chain(plan: Plan) -> tuple[Link, ...]:
    """From the first slice of the chain to the one that ends last."""
    piece = max(plan.slices, key=lambda candidate: candidate.end_s)
    links: list[Link] = []
    while True:
        before = max(
            _waited_for(plan, piece),
            key=lambda item: (item[0].end_s, item[1] is not Cause.DEVICE),
            default=None,
        )
        if before is None or piece.start_s <= GAP_TOLERANCE * plan.predicted.compute_s:
            links.append(_link(piece, Cause.START, piece.start_s))
            return tuple(reversed(links))
        gap_s = piece.start_s - before[0].end_s
        idle_s = gap_s if gap_s > GAP_TOLERANCE * plan.predicted.compute_s else 0.0
        links.append(_link(piece, before[1], idle_s))
        piece = before[0]


def _link(piece: Slice, cause: Cause, idle_s: float) -> Link:
    return Link(
        metaop=piece.metaop,
        ops=piece.ops,
        num_devices=len(piece.devices),
        start_s=piece.start_s,
        end_s=piece.end_s,
        cause=cause,
        idle_s=max(idle_s, 0.0),
    )


def _waited_for(plan: Plan, piece: Slice) -> Iterator[tuple[Slice, Cause]]:
    """Every slice that must end before this one starts, with the reason."""
    inputs = plan.by_name[piece.metaop].inputs
    devices = set(piece.devices)
    for other in plan.slices:
        if other is piece or other.end_s > piece.start_s + GAP_TOLERANCE * plan.predicted.compute_s:
            continue
        if other.metaop in inputs:
            yield other, Cause.INPUT
        elif other.metaop == piece.metaop:
            yield other, Cause.OPS
        elif not devices.isdisjoint(other.devices):
            yield other, Cause.DEVICE
