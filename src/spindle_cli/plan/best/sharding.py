"""Components whose parameters or gradients the devices share out: all of the cluster's, so that whatever uses
them runs where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from operator import add
from typing import NamedTuple, TypeVar

from spindle_cli.costs.parameters import Block, blocks_of, moved_in_passes
from spindle_cli.costs.shares import point_of_share, share_seconds
from spindle_cli.costs.work import reached_by_gradients
from spindle_cli.errors import NoPlanError, UsageError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.plan.problem import Point
from spindle_cli.plan.search.memory_fallback import heaviest
from spindle_cli.plan.search.posed import Posing
from spindle_cli.plan.slices import Slice
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile
from spindle_cli.units import counted

# Of all parameters, what is tried to share out alone, from the components that hold most.
HEAVIEST_SHARE = 0.6


def key_of(metaop: MetaOpProfile) -> str:
    """Return the name that plans have under `sharding` for a MetaOp's parameters."""
    return metaop.parameters or metaop.name


def shardings_to_try(profile: Profile, cluster: Cluster, posing: Posing) -> list[dict[str, Sharding]]:
    """What may help where memory is short: the parameters of the heaviest components, those of all, and the
    gradients of all.

    Of those that can run on all devices; none where the train settings do not let devices share optimizer
    state.
    """
    if not profile.optimizer_state_sharded or cluster.num_devices == 1:
        return []
    possible = [
        key
        for key, metaops in _users(profile).items()
        if posing.on_all(_with_any_share(metaops, cluster, profile), cluster)
    ]
    sizes = {key: size for key, size in _sizes(profile).items() if key in possible}
    largest = heaviest({key: size.num_bytes for key, size in sizes.items()}, HEAVIEST_SHARE)
    found = [
        {key: Sharding.PARAMETERS for key in sizes if key in largest},
        dict.fromkeys(sizes, Sharding.PARAMETERS),
        {key: Sharding.GRADIENTS for key, size in sizes.items() if size.trained_bytes},
    ]
    return [each for number, each in enumerate(found) if each and each not in found[:number]]


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
        each.model_copy(update={"curve": (chosen[each.name],)}) if each.name in chosen else each
        for each in profile.metaops
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
        on_all: as `Posing` has it.

    Raises:
        NoPlanError: there is none.
    """
    chosen: dict[str, Allocation] = {}
    if not any(level.is_by_pass for level in profile.sharding.values()):
        return chosen
    for key, metaops in _users(profile).items():
        if not profile.sharding.get(key, Sharding.OPTIMIZER).is_by_pass:
            continue
        degrees = on_all(metaops, cluster)
        if not degrees:
            raise _not_on_all(key, metaops, cluster)
        seconds = [
            sum(seconds_on(each, points[each.name], cluster, profile) for each in metaops)
            for points in degrees
        ]
        chosen |= degrees[seconds.index(min(seconds))]
    return chosen


def keys_with_parameters(profile: Profile) -> tuple[str, ...]:
    """The keys of parameters that have any bytes."""
    return tuple(_sizes(profile))


def _users(profile: Profile) -> dict[str, list[MetaOpProfile]]:
    """The MetaOps with each key of parameters."""
    users: dict[str, list[MetaOpProfile]] = {}
    for metaop in profile.metaops:
        users.setdefault(key_of(metaop), []).append(metaop)
    return users


class _Size(NamedTuple):
    """How large parameters are, all and those that are trained."""

    num_bytes: int
    trained_bytes: int


def _sizes(profile: Profile) -> dict[str, _Size]:
    """By key, of those that have any bytes; what keys are tied to counts for each of them."""
    blocks: dict[tuple[str, Block], _Size] = {}
    for metaop in profile.metaops:
        for op in range(metaop.num_ops):
            for use in blocks_of(metaop, op):
                own = _Size(ceil(use.num_bytes), ceil(use.trained_bytes))
                known = blocks.get((key_of(metaop), use.block), own)
                blocks[key_of(metaop), use.block] = _Size(*map(max, own, known))
    found: dict[str, _Size] = {}
    for (key, _), size in blocks.items():
        found[key] = _Size(*map(add, size, found.get(key, (0, 0))))
    return found


def _with_any_share(
    metaops: Sequence[MetaOpProfile], cluster: Cluster, profile: Profile
) -> list[MetaOpProfile]:
    """With a point on all devices for each degree of tensor parallelism whose groups do not divide the batch,
    as long as the largest share takes; as they are where plans are to have equal shares.
    """
    if cluster.is_mixed or profile.equal_shares:
        return list(metaops)
    return [_on_all_in_any_share(metaop, cluster) for metaop in metaops]


def _on_all_in_any_share(metaop: MetaOpProfile, cluster: Cluster) -> MetaOpProfile:
    count, more = cluster.num_devices, []
    known = {point.tp for point in metaop.curve if point.num_devices == count}
    for tp in sorted({share.tp for share in metaop.shares} - known):
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
    of_each = [{point.tp: point for point in each.curve if point.num_devices == count} for each in metaops]
    common = set.intersection(*(set(points) for points in of_each))
    return [
        {each.name: points[tp] for each, points in zip(metaops, of_each, strict=True)}
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
    narrow = [each for each in metaops if all(point.num_devices != count for point in each.curve)]
    hint = "Leave it whole, or use a batch that all devices divide."
    if narrow:
        fewest = min(narrow, key=lambda each: each.batch_size)  # of micro-batches, one
        why = f"{fewest.name} has no allocation on all {count} devices"
        if fewest.batch_size < count:
            why += f" for {counted(fewest.batch_size, 'sample')} at a time"
            hint = "Leave it whole, or run a sample for each device: larger batches, or fewer micro-batches."
    else:
        names = ", ".join(each.name for each in metaops)
        why = f"{names} have none of one degree of tensor parallelism on all {count} devices"
    return NoPlanError(
        f"sharding of {key!r}: {why}, and what uses shared-out parameters runs on all devices that hold them",
        hint=hint,
    )


def parse_levels(texts: Sequence[str]) -> dict[str, Sharding]:
    """Read what is sharded of which parameters from 'key=level' texts.

    Raises:
        UsageError: one is no such text, or a key is named twice.
    """
    levels: dict[str, str] = {}
    for text in texts:
        key, _, level = text.rpartition("=")
        if not key or level not in tuple(Sharding):
            raise UsageError(
                f"--shard {text}: expected KEY=LEVEL with a level of {', '.join(Sharding)}, for example "
                "--shard vision.blocks=parameters"
            )
        if key in levels:
            raise UsageError(f"--shard {text}: {key!r} is named twice")
        levels[key] = level
    return levels_of(levels)


def levels_of(sharding: Mapping[str, str]) -> dict[str, Sharding]:
    """By key, levels that are named.

    Raises:
        UsageError: there is no such level.
    """
    for key, level in sharding.items():
        if level not in tuple(Sharding):
            raise UsageError(
                f"sharding of {key!r}: found {level!r}, expected one of {', '.join(Sharding)}",
            )
    return {key: Sharding(level) for key, level in sharding.items()}


def require_sound(profile: Profile, sharding: Mapping[str, Sharding]) -> None:
    """What is asked for can be said of this workload.

    Raises:
        UsageError: no MetaOp has such parameters, or trains such as have gradients to share out.
        NoPlanError: its train settings do not let devices share anything.
    """
    known = _sizes(profile)
    for key, level in sorted(sharding.items()):
        if key not in known:
            raise UsageError(
                f"sharding of {key!r}: the profile has no such parameters",
                hint=f"It has {', '.join(sorted(known)) or 'none'}.",
            )
        if not (level.is_fetched or known[key].trained_bytes):
            raise UsageError(
                f"sharding of {key!r}: found {level}, but none of these parameters are trained",
                hint=f"Share out the parameters themselves: {key}={Sharding.PARAMETERS}.",
            )
    if not profile.optimizer_state_sharded and any(level is not Sharding.NONE for level in sharding.values()):
        raise NoPlanError(
            "sharding: the train settings do not let devices share optimizer state (shard_optimizer)",
            hint="Parameters and gradients are shared out where the optimizer's state is: set "
            "`shard_optimizer: true` under `train` and profile again.",
        )


def describe(sharding: ShardingOf) -> str:
    """What a plan says of what its devices share out because memory asks for it."""
    told = [
        f"{level} of {', '.join(keys)}"
        for level in Sharding
        if level.is_by_pass and (keys := [key for key, own in sharding.items() if own is level])
    ]
    return f"Memory asks for sharing out the {' and the '.join(told)}."
