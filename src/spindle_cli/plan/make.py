"""Making a plan: from a profile and a cluster to the plan file's content.

problem.py          index the MetaGraph, cut the curves to the cluster
bound/              the linear program over the whole graph: lower bound and allocation
strategies/         drafts: schedules without devices
search/judge.py     placement, memory, predicted iteration; the best draft wins
best/find.py        the best plan of whole batches, of micro-batches, or with what devices share out
assemble.py         the plan
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spindle_cli.account.device_memory import MEMORY_FORMULA, DeviceMemory, host_memory
from spindle_cli.costs.peaks import arithmetic_of
from spindle_cli.errors import NoPlanError, UsageError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.plan.assemble import make_plan_file
from spindle_cli.plan.best.find import (
    Found,
    find,
    find_in,
    find_on_any_number,
    in_best_micro_batches,
    require_above,
)
from spindle_cli.plan.best.find_sharded import in_best_sharding, quick_sharding
from spindle_cli.plan.best.micro_batches import in_micro_batches
from spindle_cli.plan.best.sharding import require_sound
from spindle_cli.plan.bound.any_cut import lower_bound_any_s
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.mixed.alike import are_alike, as_one_type, with_types
from spindle_cli.plan.mixed.any_cut import mixed_lower_bound_any_s
from spindle_cli.plan.mixed.bound import mixed_bound
from spindle_cli.plan.mixed.find import find_in_memory, require_possible
from spindle_cli.plan.mixed.problem import make_mixed_problem
from spindle_cli.plan.no_fit import no_fit, way_out_by_sharding
from spindle_cli.plan.problem import make_problem
from spindle_cli.plan.same_device import assumption
from spindle_cli.plan.sets.choose import with_sets
from spindle_cli.plan.types import ON_ONE_TYPE, Plan, Predicted, StrategyName
from spindle_cli.profile.machine.devices import require_precision
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import Profile

DEFAULT_EFFORT = 1


def make_plan(
    profile: Profile,
    cluster: Cluster,
    strategy: StrategyName = "spindle",
    effort: int = DEFAULT_EFFORT,
    micro_batches: Mapping[str, int] | None = None,
    sharding: ShardingOf | None = None,
    *,
    equal_shares: bool = False,
    offload: bool | None = None,
) -> Plan:
    """Plan a profiled workload for a cluster, with each set of its tasks that steps run. Same inputs, same
    plan.

    Args:
        strategy: how the devices are shared out.
        effort: 0 or more; more of it searches longer and never gives a worse plan.
        micro_batches: into how many each task's batch is cut, 1 where nothing is said; None: as many as
            memory asks for.
        sharding: by key of parameters, what the devices that hold them share out, optimizer state where
            nothing is said; None: as memory asks for.
        equal_shares: of whole batches take no number of devices that does not divide them.
        offload: whether activations may be moved to host memory where devices are short of their own; None:
            where the cluster says how fast they get there.

    Raises:
        NoPlanError: no valid allocation, nothing fits the devices' memory, a task cannot be cut so, or
            parameters cannot be shared out so.
        InputError: the profile has no curves of one of the cluster's types of device, or is of arithmetic
            that one does not have.
        UsageError: there is no such task, there are no such parameters, or activations are to be moved and
            the cluster does not say how fast.
        BelowBoundError: a bug of the planner.
    """
    if offload and cluster.links.host is None:
        raise UsageError(
            f"--offload: cluster {cluster.name!r} does not say how fast its devices reach host memory",
            hint="Give it a link: under `links`, for example `host: {latency_us: 10, "
            "bandwidth_gb_per_s: 25}`.",
        )
    if micro_batches and profile.task_sets:
        raise NoPlanError(
            "micro-batches: steps of this workload run some of its tasks (train.sampling)",
            hint="Plans for sets of tasks run whole batches.",
        )
    if sharding is not None:
        require_sound(profile, sharding)
        usual = Sharding.OPTIMIZER if profile.optimizer_state_sharded else Sharding.NONE
        sharding = {key: level for key, level in sharding.items() if level is not usual}
    profile = seen_on(profile, cluster)
    arithmetic = arithmetic_of(profile.environment)
    if arithmetic is not None:
        require_precision(cluster.types, arithmetic)
    if cluster.is_mixed and strategy in ON_ONE_TYPE and are_alike(profile):
        plan = make_plan(
            profile,
            as_one_type(cluster),
            strategy,
            effort,
            micro_batches,
            sharding,
            equal_shares=equal_shares,
            offload=offload,
        )
        return with_types(plan, profile, cluster)
    if cluster.is_mixed:
        require_possible(profile, cluster, micro_batches, sharding, offload=bool(offload))
        return plan_on_types(profile, cluster, strategy, effort)
    may_move = offload is not False
    plan = plan_of_all(
        profile,
        cluster,
        strategy,
        effort,
        micro_batches,
        sharding,
        equal_shares=equal_shares,
        may_move=may_move,
    )
    if not profile.task_sets:
        return plan
    return with_sets(
        plan, profile, lambda some: plan_of_all(some, cluster, strategy, effort, may_move=may_move)
    )


def plan_of_all(
    profile: Profile,
    cluster: Cluster,
    strategy: StrategyName,
    effort: int,
    micro_batches: Mapping[str, int] | None = None,
    sharding: ShardingOf | None = None,
    *,
    equal_shares: bool = False,
    may_move: bool = True,
) -> Plan:
    """The plan of a step that runs all tasks; the arguments, and what is raised, are those of `make_plan`.
    `may_move`: activations to host memory.
    """
    if strategy not in ON_ONE_TYPE:
        raise NoPlanError(
            f"{strategy} plans for devices of several types; all of {cluster.name!r} are {cluster.types[0]}",
            hint="Take sequential, which is the same on devices of one type.",
        )
    bound = lower_bound(make_problem(profile, cluster))
    asked = strategy, effort, micro_batches, sharding
    found = _find_with_room(profile, cluster.without_host_link(), *asked, equal_shares=equal_shares)
    if may_move and cluster.links.host is not None and (found is None or found.is_short):
        moved = _find_with_room(profile, cluster, *asked, equal_shares=equal_shares)
        if found is None or (moved is not None and moved.best.rank() < found.best.rank()):
            found = moved
    if found is None:
        raise _no_plan(profile, cluster, micro_batches, sharding)
    any_s = lower_bound_any_s(profile, cluster.num_devices)
    return _plan_of(profile, cluster, strategy, found, _Bounds(bound.lower_bound_s, any_s))


def plan_on_types(profile: Profile, cluster: Cluster, strategy: StrategyName, effort: int) -> Plan:
    """The plan of a step that runs all tasks, on devices of several types; the arguments, and what is raised,
    are those of `make_plan`.
    """
    problem = make_mixed_problem(profile, cluster)
    bound = mixed_bound(problem)
    found = find_in_memory(profile, cluster, strategy, effort, bound)
    if found is None:
        raise NoPlanError(
            f"no plan of whole batches, not with every op recomputed, fits the memory of {cluster.name!r}",
            hint="Plan for more devices, for devices with more memory, or for those of one type, whose plans "
            "may share out parameters, or run micro-batches.",
        )
    any_s = mixed_lower_bound_any_s(problem)
    return _plan_of(profile, cluster, strategy, found, _Bounds(bound.lower_bound_s, any_s))


class _Bounds(NamedTuple):
    """As a plan says them."""

    lower_s: float
    any_s: float


def _plan_of(
    profile: Profile, cluster: Cluster, strategy: StrategyName, found: Found, bounds: _Bounds
) -> Plan:
    """The plan file of what was found."""
    best = found.best
    require_above(bounds.any_s, best)
    assumed = assumption(profile, cluster)
    notes = [] if assumed is None else [assumed]
    if found.note is not None:
        notes.append(found.note)
    name = best.strategy
    if name != strategy:
        notes.append(f"No better plan was found than {name}'s, so this is it.")
    slices = best.slices if found.cut is None else found.cut.folded(best.slices)
    predicted = Predicted(
        iteration_s=best.prediction.iteration_s,
        compute_s=best.prediction.compute_s,
        lower_bound_s=bounds.lower_s,
        lower_bound_any_s=bounds.any_s,
        peak_memory_bytes=tuple(device.total_bytes for device in best.memory),
        host_memory_bytes=_host_memory(best.memory, cluster),
        memory_formula=MEMORY_FORMULA,
        transfer_s=best.prediction.transfer_s,
        processor_s=best.prediction.processor_s,
        gradient_sum_s=best.prediction.gradient_sum_s,
        optimizer_s=best.prediction.optimizer_s,
        held_up_s=best.prediction.held_up_s,
    )
    counts = None if found.cut is None else found.cut.counts
    return make_plan_file(profile, cluster, strategy, slices, predicted, tuple(notes), counts, found.sharding)


def _host_memory(memory: Sequence[DeviceMemory], cluster: Cluster) -> tuple[int, ...]:
    """Of each node; nothing where no activations are moved there."""
    found = host_memory(memory, cluster)
    return found if any(found) else ()


def _find_with_room(
    profile: Profile,
    cluster: Cluster,
    strategy: StrategyName,
    effort: int,
    micro_batches: Mapping[str, int] | None,
    sharding: ShardingOf | None,
    *,
    equal_shares: bool,
) -> Found | None:
    """The best plan; where memory is short also of those that cut batches and share out parameters. To host
    memory activations are moved where the cluster says how fast they get there.
    """
    shared_out = profile.sharded(sharding or {})
    found = _find(shared_out, cluster, strategy, effort, micro_batches, equal_shares=equal_shares)
    if (found is not None and not found.is_short) or profile.task_sets:
        return found
    may_share = sharding is None or _gives_up_memory(sharding)
    quick = quick_sharding(profile, cluster, strategy, micro_batches, sharding) if may_share else None
    if micro_batches is None:
        found = in_best_micro_batches(shared_out, cluster, strategy, effort, found, quick)
    if quick is not None and (found is None or found.is_short):
        found = in_best_sharding(quick, strategy, effort, found, is_asked=sharding is not None)
    return found


def _find(
    profile: Profile,
    cluster: Cluster,
    strategy: StrategyName,
    effort: int,
    micro_batches: Mapping[str, int] | None,
    *,
    equal_shares: bool,
) -> Found | None:
    """The best plan of whole batches, or of the micro-batches asked for, with what the profile says that
    devices share out.
    """
    if micro_batches is not None:
        return find_in(in_micro_batches(profile, micro_batches, cluster), strategy, effort)
    # What is shared out runs on all devices in any case.
    search = find if equal_shares or _gives_up_memory(profile.sharding) else find_on_any_number
    return search(profile, cluster, strategy, effort)


def _gives_up_memory(sharding: ShardingOf) -> bool:
    """Whether any parameters are to be shared out beyond their optimizer state."""
    return any(level.is_by_pass for level in sharding.values())


def _no_plan(
    profile: Profile,
    cluster: Cluster,
    micro_batches: Mapping[str, int] | None,
    sharding: ShardingOf | None,
) -> NoPlanError:
    asked: list[str] = []
    if micro_batches:
        asked.append(
            "these micro-batches: " + ", ".join(f"{task} in {count}" for task, count in micro_batches.items())
        )
    if sharding:
        asked.append("this sharding: " + ", ".join(f"{level} of {key}" for key, level in sharding.items()))
    if not asked:
        return no_fit(profile, cluster)
    way_out = way_out_by_sharding(profile, cluster) if sharding else None
    return NoPlanError(
        f"no plan fits {cluster.name!r} with {' and '.join(asked)}",
        hint=f"It would fit with {way_out}."
        if way_out is not None
        else "Plan without --micro-batches and --shard: what memory asks for is found, or what is missing.",
    )
