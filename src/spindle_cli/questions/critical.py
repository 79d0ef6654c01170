"""What an iteration waits for: the critical chain of its plan, and what binds it, from the dual values of
the allocation program, checked by solving again.

In the optimum of `plan/bound/bound.py`, one second of the bound is made of N p (the price of a
device-second times the devices) and of the flow over the MetaOps without consumers: the two add up to 1.
So N p is the part of the bound that more devices would shorten; the rest is held by the critical MetaOps,
whatever the devices.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from spindle_cli.errors import NoPlanError
from spindle_cli.files.artifact import Model
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.reasons import bound_on
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.profile.types import Profile
from spindle_cli.questions.edit import with_devices, with_one_more

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


class OtherSize(Model):
    """The question of a plan solved again with another number of devices.

    Attributes:
        num_devices: How many devices.
        lower_bound_s: Seconds that no schedule can be shorter than; null where there is no plan.
        iteration_s: Seconds of an iteration; null where there is no plan.
    """

    num_devices: int
    lower_bound_s: float | None
    iteration_s: float | None


class OfType(Model):
    """What one more device of a type is worth.

    Attributes:
        device: The type.
        num_devices: Devices of the type.
        device_value_s: Seconds by which the bound falls per device added, by the dual value.
        more: One device more, solved again.
    """

    device: str
    num_devices: int
    device_value_s: float
    more: OtherSize


class Worth(Model):
    """What devices are worth.

    Attributes:
        lower_bound_s: Seconds that no schedule can be shorter than.
        device_part: Part of the bound that is held by the number of devices; chains of MetaOps hold the rest.
        device_value_s: Seconds by which the bound falls per device added, by the dual value.
        fewer: One device fewer, solved again; of devices of several types, at the cluster's end.
        more: One device more, solved again; of devices of several types, at the cluster's end.
        of_types: What each type is worth, where there are several.
    """

    lower_bound_s: float
    device_part: float
    device_value_s: float
    fewer: OtherSize | None
    more: OtherSize
    of_types: tuple[OfType, ...] = ()


def worth_of(plan: Plan, profile: Profile) -> Worth:
    """Ask the program, then solve it again for one device fewer and one more; of several types also for one
    more of each.
    """
    cluster = plan.cluster
    bound = bound_on(profile, cluster)
    count = cluster.num_devices
    part = sum(bound.device_value_s[kind] * number for kind, number in cluster.num_of_type.items())
    of_types = tuple(
        OfType(
            device=kind,
            num_devices=number,
            device_value_s=bound.device_value_s[kind],
            more=_planned_on(plan, profile, with_one_more(cluster, kind)),
        )
        for kind, number in cluster.num_of_type.items()
        if cluster.is_mixed
    )
    return Worth(
        lower_bound_s=bound.lower_bound_s,
        device_part=min(1.0, part / bound.lower_bound_s),
        device_value_s=part / count,
        fewer=_with(plan, profile, cluster, count - 1) if count > 1 else None,
        more=_with(plan, profile, cluster, count + 1),
        of_types=of_types,
    )


def _with(plan: Plan, profile: Profile, cluster: Cluster, num_devices: int) -> OtherSize:
    return _planned_on(plan, profile, with_devices(cluster, num_devices))


def _planned_on(plan: Plan, profile: Profile, cluster: Cluster) -> OtherSize:
    num_devices = cluster.num_devices
    try:
        bound_s = bound_on(profile, cluster).lower_bound_s
        iteration_s = make_plan(profile, cluster, plan.strategy).predicted.iteration_s
    except NoPlanError:  # an answer: with so many devices nothing fits
        return OtherSize(num_devices=num_devices, lower_bound_s=None, iteration_s=None)
    return OtherSize(num_devices=num_devices, lower_bound_s=bound_s, iteration_s=iteration_s)
