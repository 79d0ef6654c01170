"""Allocations on all devices, for components whose parameters or gradients these share out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import TypeVar

from spindle_cli.costs.flops import reached_by_gradients
from spindle_cli.costs.parameters import moved_in_passes
from spindle_cli.costs.shares import point_of_share, share_seconds
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.cutting.allocations import cuts_on_all
from spindle_cli.plan.problem import Point
from spindle_cli.plan.slices import Slice
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile
from spindle_cli.units import counted


def key_of(metaop: MetaOpProfile) -> str:
    """Return the name that plans have under `sharding` for a MetaOp's parameters."""
    return metaop.parameters or metaop.name


def on_all_devices(profile: Profile, cluster: Cluster) -> Profile:
    """The profile with one allocation for each MetaOp whose component it shares out: on all devices, split as
    is fastest for the component with all that it gathers and scatters; in shares that are not equal where the
    devices do not divide a batch.

    Raises:
        NoPlanError: there is none.
    """
    if cluster.is_mixed:  # of several types the problem says it, as they cut batches by their speeds
        return profile
    if not any(level.is_by_pass for level in profile.sharding.values()):
        return profile
    any_share = profile.with_metaops(_with_any_share(profile.metaops, cluster, profile))
    chosen = chosen_on_all(any_share, cluster, points_on_all)
    if not chosen:
        return profile
    metaops = [
        metaop.model_copy(update={"curve": (chosen[metaop.name],)}) if metaop.name in chosen else metaop
        for metaop in profile.metaops
    ]
    return profile.with_metaops(metaops)


Allocation = TypeVar("Allocation", CurvePoint, Point)


def chosen_on_all(
    profile: Profile,
    cluster: Cluster,
    on_all: Callable[[Sequence[MetaOpProfile], Cluster], Sequence[Mapping[str, Allocation]]],
) -> dict[str, Allocation]:
    """By name, the allocation of each MetaOp whose component a profile shares out: on all devices, split as
    is fastest for the component with all that it gathers and scatters.

    Args:
        on_all: gives, for each degree of tensor parallelism with which MetaOps run on all devices, their
            allocations by name.

    Raises:
        NoPlanError: there is none.
    """
    chosen: dict[str, Allocation] = {}
    if not any(level.is_by_pass for level in profile.sharding.values()):
        return chosen
    for key, metaops in users_of(profile).items():
        if not profile.sharding.get(key, Sharding.OPTIMIZER).is_by_pass:
            continue
        degrees = on_all(metaops, cluster)
        if not degrees:
            raise _not_on_all(key, metaops, cluster)
        seconds = [
            sum(seconds_on(metaop, points[metaop.name], cluster, profile) for metaop in metaops)
            for points in degrees
        ]
        chosen |= degrees[seconds.index(min(seconds))]
    return chosen


def users_of(profile: Profile) -> dict[str, list[MetaOpProfile]]:
    """The MetaOps with each key of parameters."""
    users: dict[str, list[MetaOpProfile]] = {}
    for metaop in profile.metaops:
        users.setdefault(key_of(metaop), []).append(metaop)
    return users


def run_on_all(metaops: Sequence[MetaOpProfile], cluster: Cluster, profile: Profile) -> bool:
    """Tell whether these MetaOps all run on all devices with one degree of tensor parallelism."""
    if cluster.is_mixed:
        return bool(cuts_on_all(metaops, cluster))
    return bool(points_on_all(_with_any_share(metaops, cluster, profile), cluster))


def _with_any_share(
    metaops: Sequence[MetaOpProfile], cluster: Cluster, profile: Profile
) -> list[MetaOpProfile]:
    """With a point on all devices for each degree of tensor parallelism whose groups do not divide the batch,
    as long as the largest share takes; as they are where plans are to have equal shares.
    """
    if profile.equal_shares:
        return list(metaops)
    return [_on_all_in_any_share(metaop, cluster) for metaop in metaops]


def _on_all_in_any_share(metaop: MetaOpProfile, cluster: Cluster) -> MetaOpProfile:
    count, more = cluster.num_devices, []
    known_degrees = {point.tp for point in metaop.curve if point.num_devices == count}
    for tp in sorted({share.tp for share in metaop.shares} - known_degrees):
        dp = count // tp
        if dp * tp == count and 1 < dp < metaop.batch_size and metaop.batch_size % dp:
            op = share_seconds(metaop.shares, ceil(metaop.batch_size / dp), tp)
            more += [] if op is None else [point_of_share(dp, tp, op)]
    return metaop.model_copy(update={"curve": (*metaop.curve, *more)}) if more else metaop


def points_on_all(metaops: Sequence[MetaOpProfile], cluster: Cluster) -> list[dict[str, CurvePoint]]:
    """For each degree of tensor parallelism with which all of these run on all devices, their points by name;
    the least degree first. Of one type of device.
    """
    count = cluster.num_devices
    points_by_degree = [
        {point.tp: point for point in metaop.curve if point.num_devices == count} for metaop in metaops
    ]
    common = set.intersection(*(set(points) for points in points_by_degree))
    return [
        {metaop.name: points[tp] for metaop, points in zip(metaops, points_by_degree, strict=True)}
        for tp in sorted(common)
        if cluster.num_groups(tp) * tp >= count
    ]


def seconds_on(metaop: MetaOpProfile, point: CurvePoint | Point, cluster: Cluster, profile: Profile) -> float:
    """Return what all ops of a MetaOp take on an allocation, with gathers and scatters over all devices."""
    is_reached = reached_by_gradients(profile.metaops)[metaop.name]
    longer_s = sum(longer_on(metaop, point, cluster, profile, is_reached=is_reached))
    return metaop.num_ops * (point.forward_s + point.backward_s) + longer_s


def longer_on(
    metaop: MetaOpProfile, point: CurvePoint | Point, cluster: Cluster, profile: Profile, *, is_reached: bool
) -> tuple[float, float]:
    """By how much the passes of all ops of a MetaOp on an allocation are longer for what is gathered and
    scattered on all devices, forward and backward.

    Args:
        is_reached: whether gradients come to it (`reached_by_gradients`).
    """
    whole = Slice.model_construct(
        metaop=metaop.name,
        ops=(0, metaop.num_ops),
        devices=tuple(range(cluster.num_devices)),
        dp=point.dp,
        tp=point.tp,
        start_s=0.0,
        end_s=0.0,
    )
    moved = moved_in_passes(whole, metaop, cluster, profile, is_reached=is_reached)
    return (0.0, 0.0) if moved is None else moved.longer_s(point.forward_s, point.backward_s)


def _not_on_all(key: str, metaops: Sequence[MetaOpProfile], cluster: Cluster) -> NoPlanError:
    count = cluster.num_devices
    narrow = [metaop for metaop in metaops if all(point.num_devices != count for point in metaop.curve)]
    hint = "Leave it whole, or use a batch that all devices divide."
    if narrow:
        fewest = min(narrow, key=lambda metaop: metaop.batch_size)  # of micro-batches, one
        why = f"{fewest.name} has no allocation on all {count} devices"
        if fewest.batch_size < count:
            why += f" for {counted(fewest.batch_size, 'sample')} at a time"
            hint = "Leave it whole, or run a sample for each device: larger batches, or fewer micro-batches."
    else:
        names = ", ".join(metaop.name for metaop in metaops)
        why = f"{names} have none of one degree of tensor parallelism on all {count} devices"
    return NoPlanError(
        f"sharding of {key!r}: {why}, and what uses shared-out parameters runs on all devices that hold them",
        hint=hint,
    )
