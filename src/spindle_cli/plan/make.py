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

from spindle_cli.account.device_memory import MEMORY_FORMULA, DeviceMemory, host_memory
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
from spindle_cli.plan.no_fit import no_fit, way_out_by_sharding
from spindle_cli.plan.problem import make_problem
from spindle_cli.plan.same_device import assumption
from spindle_cli.plan.sets.choose import with_sets
from spindle_cli.plan.types import Plan, Predicted, StrategyName
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
    bound = lower_bound(make_problem(profile, cluster))
    assumed = assumption(profile, cluster)
    notes = [] if assumed is None else [assumed]
    asked = strategy, effort, micro_batches, sharding
    found = _find_with_room(profile, cluster.without_host_link(), *asked, equal_shares=equal_shares)
    if may_move and cluster.links.host is not None and (found is None or found.is_short):
        moved = _find_with_room(profile, cluster, *asked, equal_shares=equal_shares)
        if found is None or (moved is not None and moved.best.rank() < found.best.rank()):
            found = moved
    if found is None:
        raise _no_plan(profile, cluster, micro_batches, sharding)
    best = found.best
    any_s = lower_bound_any_s(profile, cluster.num_devices)
    require_above(any_s, best)
    if found.note is not None:
        notes.append(found.note)
    name = best.strategy
    if name != strategy:
        notes.append(f"No better plan was found than {name}'s, so this is it.")
    slices = best.slices if found.cut is None else found.cut.folded(best.slices)
    predicted = Predicted(
        iteration_s=best.prediction.iteration_s,
        compute_s=best.prediction.compute_s,
        lower_bound_s=bound.lower_bound_s,
        lower_bound_any_s=any_s,
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
