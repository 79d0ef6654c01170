"""The critical chain of a plan: the slices that the end of its schedule waits for, one after another."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from spindle_cli.files.artifact import Model
from spindle_cli.plan.types import Plan, Slice

# Slices follow each other in ticks of the planner; a longer gap than this part of the schedule is idle time.
GAP_TOLERANCE = 1e-6


class Cause(StrEnum):
    """What a slice of the chain waits for."""

    START = "start"  # nothing: it is the first
    INPUT = "input"  # the output of the slice before it
    OPS = "ops"  # the ops before its own, of the same MetaOp; backward those behind them
    GRADIENT = "gradient"  # backward: the gradient of its output, from the slice before it
    FORWARD = "forward"  # backward: its own forward pass
    DEVICE = "device"  # a device that the slice before it occupies


class Link(Model):
    """One slice of the critical chain, or where the plan tells passes apart one pass of it, and why it did
    not start earlier.

    Attributes:
        metaop: Name of the MetaOp.
        ops: Its ops, [first, last).
        num_devices: Devices that it runs on.
        start_s: Its start.
        end_s: Its end.
        cause: What it waits for.
        idle_s: Seconds between the end of what it waits for and its start.
        is_backward: Whether it is a backward pass.
        micro_batch: Which of how many micro-batches it is of, '2/4'; empty where its task has one.
    """

    metaop: str
    ops: tuple[int, int]
    num_devices: int
    start_s: float
    end_s: float
    cause: Cause
    idle_s: float = 0.0
    is_backward: bool = False
    micro_batch: str = ""  # which of how many it is of, '2/4'; empty where its task has one


class _Stretch(NamedTuple):
    """A slice from a start to an end; the second stretch of a slice is its backward pass."""

    slice_: Slice
    is_backward: bool
    start_s: float
    end_s: float


def critical_chain(plan: Plan) -> tuple[Link, ...]:
    """Return the links of the critical chain, from its first slice to the one that ends last."""
    stretches = [
        _Stretch(slice_, number == 1, start_s, end_s)
        for slice_ in plan.slices
        for number, (start_s, end_s) in enumerate(slice_.times_s)
    ]
    tolerance_s = GAP_TOLERANCE * plan.predicted.compute_s
    this = max(stretches, key=lambda candidate: candidate.end_s)
    links: list[Link] = []
    while True:
        ended = [
            earlier
            for earlier in stretches
            if earlier is not this and earlier.end_s <= this.start_s + tolerance_s
        ]
        causes = ((earlier, cause) for earlier in ended if (cause := _cause(plan, this, earlier)) is not None)
        before = max(causes, key=lambda item: (item[0].end_s, item[1] is not Cause.DEVICE), default=None)
        if before is None or this.start_s <= tolerance_s:
            links.append(_link(this, Cause.START, this.start_s))
            return tuple(reversed(links))
        gap_s = this.start_s - before[0].end_s
        links.append(_link(this, before[1], gap_s if gap_s > tolerance_s else 0.0))
        this = before[0]


def _link(this: _Stretch, cause: Cause, idle_s: float) -> Link:
    return Link(
        metaop=this.slice_.metaop,
        ops=this.slice_.ops,
        num_devices=len(this.slice_.devices),
        start_s=this.start_s,
        end_s=this.end_s,
        cause=cause,
        idle_s=max(idle_s, 0.0),
        is_backward=this.is_backward,
        micro_batch=this.slice_.part.strip(),
    )


def _cause(plan: Plan, this: _Stretch, earlier: _Stretch) -> Cause | None:
    """Why a stretch waits for another one that ends before it; None where it does not."""
    slice_, before = this.slice_, earlier.slice_
    if this.is_backward and before is slice_:
        return Cause.FORWARD
    if this.is_backward == earlier.is_backward and slice_.micro_batch == before.micro_batch:
        if slice_.metaop == before.metaop and (slice_.ops > before.ops) != this.is_backward:
            return Cause.OPS
        if not this.is_backward and before.metaop in plan.by_name[slice_.metaop].inputs:
            return Cause.INPUT
        if this.is_backward and slice_.metaop in plan.by_name[before.metaop].inputs:
            return Cause.GRADIENT
    return None if set(slice_.devices).isdisjoint(before.devices) else Cause.DEVICE
