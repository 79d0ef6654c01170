"""How much each device has of what devices share out: as much as all others, as much as is asked for, or by
its free memory, or by its speed.

By free memory, strategy and weights are found in turn. The account of a plan says what each device has free
beside the optimizer state that is shared out, of one type the device with the least of it. In proportion to
that the state is shared out and planned for again, until the weights stay as they are or have been before.
Where memory asks for it the fastest of these plans is taken, where a user does the last. The first account
is of the plan with equal parts, or, where none fits, of the plan for as many devices with ample memory,
against what they have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Literal

from spindle_cli.account.device_memory import DeviceMemory, device_memory
from spindle_cli.account.traffic import communicator_bytes
from spindle_cli.errors import NoPlanError, UsageError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import ShardWeights
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import MetaOpProfile, Profile

# What a user may ask for: equal parts; by free memory; by speed; or by type of device, what each has in
# proportion.
ShardBy = Literal["even", "memory", "speed"] | Mapping[str, int]
# Most plans with weights: where they are asked for, and where they are one thing to try of several.
_MOST_ASKED, _MOST_TRIED = 4, 2
# Of a device's memory, the optimizer state from which on other weights are tried without being asked for.
WORTH_FREEING = 0.05
# Plans a profile, with its weights, for a cluster.
Make = Callable[[Profile, Cluster], Plan]


def with_best_weights(
    profile: Profile, cluster: Cluster, shard_by: ShardBy | None, make: Make, is_short: Callable[[Plan], bool]
) -> Plan:
    """The plan with parts of what devices share out that are as asked for.

    Args:
        shard_by: by type, of all types that the cluster has, or more; None: equal parts, but on devices of
            several types by free memory where equal ones make devices short of memory, and that is faster.
        is_short: whether a plan gives up speed for memory.

    Raises:
        NoPlanError: `make` does, or nothing is shared out.
    """
    if shard_by == "even" or (shard_by is None and not cluster.is_mixed):
        return make(profile, cluster)
    if not profile.optimizer_state_sharded:
        if shard_by is None:
            return make(profile, cluster)
        raise NoPlanError(
            "--shard-by: the train settings do not let devices share optimizer state (shard_optimizer)",
            hint="Set `shard_optimizer: true` under `train` and profile again, or leave it out.",
        )
    if isinstance(shard_by, Mapping):
        weights = reduced([shard_by[kind] for kind in cluster.type_of])
        return make(profile.weighted(weights), cluster)
    if shard_by == "speed":
        return make(profile.weighted(by_speed(profile, cluster)), cluster)
    return _by_memory_or_even(profile, cluster, make, is_short, is_requested=shard_by == "memory")


def _by_memory_or_even(
    profile: Profile, cluster: Cluster, make: Make, is_short: Callable[[Plan], bool], *, is_requested: bool
) -> Plan:
    """The plan with weights by free memory. Where these are not asked for, the fastest of such plans and that
    with equal parts, which alone is made where it is not short of memory.

    Raises:
        NoPlanError: `make` does for all weights.
    """
    evenly = _tried(make, profile, cluster)
    if not is_requested and isinstance(evenly, Plan) and not (is_short(evenly) and _may_free(evenly)):
        return evenly
    start = evenly if isinstance(evenly, Plan) else _tried(make, profile, cluster.with_ample_memory())
    most = _MOST_ASKED if is_requested else _MOST_TRIED
    by_memory = _by_memory(profile, cluster, start, make, most)
    if is_requested and by_memory:
        return by_memory[-1]
    plans = [plan for plan in (evenly, *by_memory) if isinstance(plan, Plan)]
    fastest = min(plans, key=lambda plan: plan.predicted.iteration_s, default=None)
    if fastest is None:
        assert isinstance(evenly, NoPlanError), "what is no plan says why"
        raise evenly
    return fastest


def _tried(make: Make, profile: Profile, cluster: Cluster) -> Plan | NoPlanError:
    try:
        return make(profile, cluster)
    except NoPlanError as error:  # with other weights, or more memory, there may be one
        return error


def _by_memory(
    profile: Profile, cluster: Cluster, start: Plan | NoPlanError, make: Make, most: int
) -> list[Plan]:
    """At most so many plans with weights by free memory, each by what the one before, first of all `start`,
    leaves free.
    """
    plans: list[Plan] = []
    seen: set[ShardWeights] = {()}
    last = start
    while isinstance(last, Plan) and len(plans) < most:
        weights = by_free_memory(_free_bytes(last, cluster), cluster)
        if weights in seen:
            break
        seen.add(weights)
        last = _tried(make, profile.weighted(weights), cluster)
        if isinstance(last, Plan):
            plans.append(_noted(last))
    return plans


def _may_free(plan: Plan) -> bool:
    """Whether a device has so much of its memory in optimizer state that other weights may matter."""
    needs = zip(plan.cluster.fill_bytes, _needs(plan, plan.cluster), strict=True)
    return any(need.optimizer_bytes > WORTH_FREEING * capacity for capacity, need in needs)


def _free_bytes(plan: Plan, cluster: Cluster) -> list[int]:
    """What a plan would leave free on each device of a cluster at its fullest moment beside the optimizer
    state; below 0 where it has less than it needs.
    """
    needs = zip(cluster.fill_bytes, _needs(plan, cluster), strict=True)
    return [capacity - need.total_bytes + need.optimizer_bytes for capacity, need in needs]


def _needs(plan: Plan, cluster: Cluster) -> tuple[DeviceMemory, ...]:
    """What each device of a cluster needs under a plan that may be of another one with as many."""
    return device_memory(plan.metaops, plan.slices, cluster, plan, communicator_bytes(plan), plan.turn)


def by_free_memory(free: Sequence[int], cluster: Cluster) -> ShardWeights:
    """Weights in proportion to the least free bytes of the devices of each type and size of memory, per cent
    of the largest; none where these are all equal.
    """
    kinds = list(zip(cluster.type_of, cluster.memory_bytes, strict=True))
    least: dict[tuple[str, int], int] = {}
    for kind, num_bytes in zip(kinds, free, strict=True):
        least[kind] = min(num_bytes, least.get(kind, num_bytes))
    largest = max(*least.values(), 1)
    return reduced([max(1, round(FULL * least[kind] / largest)) for kind in kinds])


def require_types(shard_by: ShardBy | None, cluster: Cluster) -> None:
    """Weights that are asked for by type are of the types that a cluster has.

    Raises:
        UsageError: one is named that it does not have, or is missing.
    """
    if isinstance(shard_by, Mapping) and set(shard_by) != set(cluster.types):
        raise UsageError(
            f"--shard-by: found weights for {', '.join(sorted(shard_by))}; expected one for each type of "
            f"device of {cluster.name!r}: {', '.join(cluster.types)}",
        )


def _noted(plan: Plan) -> Plan:
    of_types = dict(zip(plan.cluster.type_of, plan.shard_weights, strict=True))
    told = ", ".join(f"{weight} parts to each {kind}" for kind, weight in of_types.items())
    note = f"Optimizer state is shared out by free memory: {told}."
    return plan.model_copy(update={"notes": (*plan.notes, note)})


# Weights that are not asked for as numbers are per cent of the largest.
FULL = 100


def by_speed(profile: Profile, cluster: Cluster) -> ShardWeights:
    """Weights in proportion to how often a second a device of each type would run all ops of the workload, at
    its best allocation of each; none where the types are equally fast. HAP's ratios of one number per device.

    Args:
        profile: as the cluster's types see it (`seen_on`).
    """
    if not cluster.is_mixed:
        return ()
    alone_s = {kind: _device_seconds(profile, kind) for kind in cluster.types}
    least_s = min(alone_s.values())
    parts = {kind: round(FULL * least_s / own_s) if own_s else FULL for kind, own_s in alone_s.items()}
    return reduced([max(1, parts[kind]) for kind in cluster.type_of])


def _device_seconds(profile: Profile, kind: str) -> float:
    """Seconds in which one device of a type runs all ops of the workload once, forward and backward."""
    return sum(metaop.num_ops * _op_device_seconds(metaop, kind) for metaop in profile.metaops)


def _op_device_seconds(metaop: MetaOpProfile, kind: str) -> float:
    return min(point.op_s * point.num_devices for point in metaop.curve if point.device == kind)


def reduced(weights: list[int]) -> ShardWeights:
    """Without their common factor; none where all are equal."""
    if len(set(weights)) == 1:
        return ()
    factor = gcd(*weights)
    return tuple(weight // factor for weight in weights)
