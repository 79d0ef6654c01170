"""Making a plan: from a profile and a cluster to the plan file's content.

posing.py           index the MetaGraph, with the allocations of its MetaOps on the cluster
cutting/            on several types of device: allocations over them, by how fast shares are on each
bound/              the linear program over the whole graph: lower bound and allocation
strategies/         candidates: schedules without devices
search/evaluate.py     placement, memory, predicted iteration; the best candidate wins
mixed/candidates.py     the same on devices of several types
best/in_memory.py   the best inside of memory, by refine/search.py: a search over everything at once
best/find_as_requested.py  the best plan of what is asked for
best/seeds.py       where memory is short: quick plans that give up something, and the search from the best
replica_groups/     the best of these and of plans whose parameters replica groups of devices shard
stages/pipelined.py the best of these and of pipelines of micro-batches
best/otherwise.py   where nothing fits, another strategy's plan, or one that leaves nodes idle
best/written.py     the plan
islands/planned.py  the plan of one of several islands that average now and then alone
sets/choose.py      where steps run some of the tasks: a plan for each set of these, by the best strategy
weights/choose.py   the same with unequal parts of what devices share out, where memory asks for it
sums/choose.py      the same with gradients gathered as what they are made of, where that gains
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from spindle_cli.errors import NoPlanError, UsageError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.find_as_requested import find_as_requested
from spindle_cli.plan.best.idle_nodes import or_on_fewer
from spindle_cli.plan.best.in_memory import recomputed_share
from spindle_cli.plan.best.otherwise import found_otherwise
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.best.request import DEFAULT_EFFORT, PlanRequest
from spindle_cli.plan.best.sharding import require_sound
from spindle_cli.plan.best.written import Bounds, plan_of
from spindle_cli.plan.bound.any_cut import AnyCut
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.islands.planned import on_islands
from spindle_cli.plan.mixed.alike import are_alike, as_one_type, with_types
from spindle_cli.plan.no_fit import no_plan_as_requested
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.replica_groups.find import InReplicaGroups
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.sets.choose import by_best_strategy, with_sets
from spindle_cli.plan.stages.pipelined import in_pipelines
from spindle_cli.plan.sums.choose import with_sums
from spindle_cli.plan.types import ON_ONE_TYPE, Plan, StrategyName, Sums, strategies_on
from spindle_cli.plan.weights.choose import ShardBy, require_types, with_best_weights
from spindle_cli.plan.weights.on_part import weights_on
from spindle_cli.profile.mixed.seen import require_arithmetic, seen_on
from spindle_cli.profile.types import Profile
from spindle_cli.simulate.run import simulate

# Of all forward passes, the share that is recomputed from which on other parts of what devices share out may
# make a plan 1 % faster: a forward pass is about a third of an op.
WORTH_OTHER_WEIGHTS = 0.03


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
    sums: Sums = "auto",
    shard_by: ShardBy | None = None,
) -> Plan:
    """Plan a profiled workload for a cluster, with each set of its tasks that steps run. Same inputs, same
    plan.

    Args: what follows the cluster is said at `PlanRequest`.

    Raises:
        NoPlanError: no valid allocation, nothing fits the devices' memory, a task cannot be cut so, or
            parameters cannot be shared out so.
        InputError: the profile has no curves of one of the cluster's types of device, or is of arithmetic
            that one does not have.
        UsageError: there is no such task, there are no such parameters, or activations are to be moved and
            the cluster does not say how fast.
        BelowBoundError: a bug of the planner.
    """
    request = PlanRequest(strategy, effort, micro_batches, sharding, equal_shares, offload, sums, shard_by)
    _require_possible(profile, cluster, request)
    request = replace(request, sharding=_unusual(profile, sharding))
    profile = seen_on(profile, cluster)
    if profile.local_sgd is not None:
        return on_islands(profile, cluster, profile.local_sgd, partial(_made, request=request))
    return _made(profile, cluster, request)


def _made(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
    """The plan for devices that all train one model."""
    require_arithmetic(profile, cluster)
    plan = _plan_with_weights(profile, cluster, request)
    if request.sums == "dense" or not any(metaop.matrices for metaop in profile.metaops):
        return plan
    again = partial(_plan_with_weights, cluster=cluster, request=request)
    return with_sums(plan, profile, request.sums, again)


def _plan_with_weights(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
    """The plan with parts of what devices share out as asked for, or as memory asks for."""
    shard_by = request.shard_by
    if shard_by is None and (request.strategy != "spindle" or are_alike(profile)):
        shard_by = "even"

    def is_short(plan: Plan) -> bool:
        is_cut = bool(plan.micro_batches) and not request.micro_batches
        shares_out_more = bool(plan.sharding) and not request.sharding
        moves = any(slice_.offload for slice_ in plan.slices)
        recomputes = recomputed_share(plan.slices, profile.by_name, plan.cluster)
        return is_cut or shares_out_more or moves or recomputes > WORTH_OTHER_WEIGHTS

    def make(weighted: Profile, on: Cluster) -> Plan:
        return _plan(weighted, on, request)

    return with_best_weights(profile, cluster, shard_by, make, is_short)


def _plan(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
    """The plan with what the profile's MetaOps say that is gathered."""
    if not cluster.is_mixed:
        return _with_sets(profile, cluster, request)
    _require_updated_once(profile, cluster, request.sharding)
    if request.strategy in ON_ONE_TYPE and are_alike(profile):
        return with_types(_with_sets(profile, as_one_type(cluster), request), profile, cluster)
    return _with_sets(profile, cluster, request)


def _require_possible(profile: Profile, cluster: Cluster, request: PlanRequest) -> None:
    """Stop at what no plan of this profile on this cluster can be.

    Raises:
        NoPlanError, UsageError: as `make_plan` says.
    """
    if request.offload and not cluster.knows_host_links:
        raise UsageError(
            f"--offload: cluster {cluster.name!r} does not say how fast its devices reach host memory",
            hint="Give it a link: under `links`, for example `host: {latency_us: 10, "
            "bandwidth_gb_per_s: 25}`.",
        )
    if request.sharding is not None:
        require_sound(profile, request.sharding)
    require_types(request.shard_by, cluster)


def _unusual(profile: Profile, sharding: ShardingOf | None) -> ShardingOf | None:
    """What is asked to be shared out beyond what the workload shares out in any case."""
    if sharding is None:
        return None
    usual = Sharding.OPTIMIZER if profile.optimizer_state_sharded else Sharding.NONE
    return {key: level for key, level in sharding.items() if level is not usual}


def _with_sets(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
    """The plan of all tasks, with one of each set of tasks that steps run."""
    if not profile.task_sets:
        return _plan_of_all_tasks(profile, cluster, request)

    def by(strategy: StrategyName) -> Plan:
        plan = _plan_of_all_tasks(profile, cluster, replace(request, strategy=strategy))

        def of_a_set(some: Profile) -> Plan:
            cut = {metaop.task: plan.micro_batches.get(metaop.task, 1) for metaop in some.metaops}
            keys = {metaop.parameters or metaop.name for metaop in some.metaops}
            sharding = {key: level for key, level in plan.sharding.items() if key in keys}
            set_request = PlanRequest(
                strategy,
                request.effort,
                micro_batches=cut if plan.micro_batches else None,
                sharding=sharding or None,
                equal_shares=request.equal_shares,
                offload=request.offload,
                gives_up=False,
            )
            return _plan_of_all_tasks(some, cluster, set_request)

        return with_sets(plan, profile, of_a_set, ProblemPoser())

    return by_best_strategy(request.strategy, cluster, by)


def _plan_of_all_tasks(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
    """The plan of a step that runs all tasks."""
    if request.strategy not in strategies_on(cluster) and not cluster.is_mixed:
        raise NoPlanError(
            f"{request.strategy} plans for devices of several types; all of {cluster.name!r} are "
            f"{cluster.types[0]}",
            hint="Take sequential, which is the same on devices of one type.",
        )
    find_on = partial(_found_on, profile, cluster)
    result, bounds = _found(profile, cluster, request)
    result = result or found_otherwise(profile, cluster, request, find_on)
    if result is None:
        raise no_plan_as_requested(profile, cluster, request)
    if not cluster.is_mixed:
        result = or_on_fewer(profile, cluster, request, result, find_on)
    return plan_of(profile, cluster, request.strategy, result, bounds)


def _found(profile: Profile, cluster: Cluster, request: PlanRequest) -> tuple[PlanResult | None, Bounds]:
    """The best plan of those that may use all devices, or None, and what no plan is shorter than."""
    bound = lower_bound(make_problem(profile, cluster))
    bounds = Bounds(bound.lower_bound_s, AnyCut(profile, request.allowed(cluster), request.micro_batches))

    def simulated_s(result: PlanResult) -> float:
        return simulate(plan_of(profile, cluster, request.strategy, result, bounds)).iteration_s

    replica_groups = InReplicaGroups(profile, cluster, request, bound.lower_bound_s, simulated_s)
    result = replica_groups.or_better(find_as_requested(profile, cluster, request, replica_groups.or_less_s))
    if _may_pipeline(request):
        cut = request.micro_batches
        result = in_pipelines(profile, cluster, result, bounds.any_cut.work_or_chain_s, simulated_s, cut)
    return result, bounds


def _may_pipeline(request: PlanRequest) -> bool:
    """Whether nothing is asked for that these pipelines cannot be."""
    is_free = request.gives_up and request.sharding is None and not request.equal_shares
    return request.strategy == "spindle" and request.effort > NO_SEARCH and is_free


def _found_on(profile: Profile, whole: Cluster, cluster: Cluster, request: PlanRequest) -> PlanResult | None:
    """The best plan for a cluster, or for some of its nodes by themselves."""
    seen = profile
    if cluster is not whole:
        seen = seen_on(profile, cluster).weighted(weights_on(cluster, profile.shard_weights, whole))
    if cluster.is_mixed:
        return find_as_requested(seen, cluster, request)
    return _found(seen, cluster, request)[0]


def _require_updated_once(profile: Profile, cluster: Cluster, sharding: ShardingOf | None = None) -> None:
    """Refuse parameters of which devices of several types would each update a copy. `sharding`: as asked.

    Raises:
        NoPlanError: every device updates its own copies.
    """
    types = ", ".join(cluster.types)
    alone = [key for key, level in (sharding or {}).items() if level is Sharding.NONE]
    if not cluster.is_cpu and alone:
        raise NoPlanError(
            f"sharding: none for {alone[0]!r}: {cluster.name!r} has devices of several types ({types}), each "
            "of which would update its own copy: types round differently, and the copies would drift apart",
            hint="Ask for `optimizer`, or more, in the place of `none`.",
        )
    if not cluster.is_cpu and not profile.optimizer_state_sharded:
        raise NoPlanError(
            f"{cluster.name!r} has devices of several types ({types}), each of which would "
            "update its own copy of a parameter: types round differently, and the copies would drift apart",
            hint="Let one device update each: `shard_optimizer: true` under `train`, and profile again.",
        )
