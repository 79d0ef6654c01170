"""The best plan of those that are asked for: also of micro-batches, with parameters shared out and with
activations in host memory, where memory is short.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.again import moving_instead
from spindle_cli.plan.best.find import PlanResult, find, find_in, find_wide, widened
from spindle_cli.plan.best.idle_nodes import on_best_part
from spindle_cli.plan.best.micro_batches import in_micro_batches
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.best.request import PlanRequest, gives_up_memory
from spindle_cli.plan.best.seeds import Seeds
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.search.memory_fallback import ASKS, OrLessS, describe, itself
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.weights.on_part import weights_on
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import Profile


def find_as_requested(
    profile: Profile, cluster: Cluster, request: PlanRequest, or_less_s: OrLessS = itself
) -> PlanResult | None:
    """The best plan of a step that runs all tasks; None: nothing that is asked for fits, or what does is not
    faster than another kind of plan.

    Raises:
        NoPlanError: a MetaOp has no valid allocation, the strategy no plan on these types, or a task cannot
            be cut or shared out so.
        BelowBoundError: a bug of the planner.
    """
    if request.equal_shares:
        profile = profile.in_equal_shares()
    cluster = request.allowed(cluster)
    posing = ProblemPoser()
    bound_s = posing.posed(profile, cluster).lower_bound_s
    profile = profile.sharded(request.sharding or {})
    # What is shared out runs on all devices in any case.
    is_free = not request.equal_shares and not gives_up_memory(profile.sharding) and not cluster.is_mixed
    wide = widened(profile, cluster) if is_free and request.micro_batches is None else profile
    cut = partial(in_micro_batches, cluster=cluster)
    strategy, effort = request.strategy, request.effort
    result: PlanResult | None
    if request.micro_batches is not None:
        asked_for = cut(profile, request.micro_batches)
        posed_problem = posing.posed(asked_for.one, cluster)
        baselines = map(posed_problem.by_baseline, posed_problem.baselines(strategy))
        quick = [posed_problem.best(strategy, NO_SEARCH)[0], *baselines]
        is_searched = strategy == "spindle" and not gives_up_memory(profile.sharding)
        over_all = effort if is_searched else NO_SEARCH
        search = partial(find, cluster=cluster, strategy=strategy, effort=effort, posing=posing)
        result = find_in(asked_for, search, [plan for plan in quick if plan is not None], over_all)
    else:
        result = find_wide(profile, wide, cluster, strategy, effort, posing)
        result = _or_on_part(result, profile, cluster, request, posing)
    seeds = Seeds(wide, cluster, request, posing, cut)
    return or_moving(seeds.or_better(result, bound_s, or_less_s), profile, cluster)


def _or_on_part(
    result: PlanResult | None, profile: Profile, cluster: Cluster, request: PlanRequest, posing: ProblemPoser
) -> PlanResult | None:
    """A plan, or on several types a shorter one that leaves nodes idle."""
    may_leave = request.strategy == "spindle" and request.effort != NO_SEARCH and not request.shares_out_more
    if result is None or not cluster.is_mixed or not may_leave:
        return result
    posed_problem = posing.posed(profile, cluster)
    return on_best_part(
        posed_problem.problem,
        posed_problem.bound,
        result,
        partial(_on_part, profile, request.effort, cluster),
    )


def _on_part(profile: Profile, effort: int, whole: Cluster, part: Cluster) -> PlanResult | None:
    """The best plan for some nodes of a cluster by themselves, of whole batches."""
    seen = seen_on(profile, part).weighted(weights_on(part, profile.shard_weights, whole))
    return find(seen, part, "spindle", effort, ProblemPoser())


def or_moving(result: PlanResult | None, profile: Profile, cluster: Cluster) -> PlanResult | None:
    """A plan, or a shorter one that moves activations to host memory where it recomputes."""
    if result is None or not cluster.knows_host_links:
        return result
    problem = (
        make_problem(profile.sharded(result.sharding), cluster) if result.cut is None else result.cut.all
    )
    moved = moving_instead(problem, result.best)
    if moved is result.best:
        return result
    before, after = (describe(best.slices) or "" for best in (result.best, moved))
    # What splits layers, or shares out parameters, is said before what recomputes.
    said = (result.note or before).replace(before.removeprefix(ASKS), after.removeprefix(ASKS))
    return replace(result, best=moved, note=said)
