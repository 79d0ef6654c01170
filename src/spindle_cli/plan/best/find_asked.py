"""The best plan of those that are asked for: also of micro-batches, with parameters shared out and with
activations in host memory, where memory is short.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.again import moving_instead
from spindle_cli.plan.best.asked import Asked, gives_up_memory
from spindle_cli.plan.best.drafts import ONE_TYPE
from spindle_cli.plan.best.find import (
    CutPlanner,
    Found,
    OneTypeCutPlanner,
    find,
    find_in_asked,
    find_on_any_number,
    in_best_micro_batches,
)
from spindle_cli.plan.best.find_sharded import in_best_sharding, quick_sharding
from spindle_cli.plan.best.in_memory import NEAR_BOUND
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.problem import make_problem
from spindle_cli.plan.search.memory_fallback import ASKS, OrLessS, describe, itself
from spindle_cli.plan.search.posed import Posing
from spindle_cli.profile.types import Profile


def find_asked(profile: Profile, cluster: Cluster, asked: Asked, or_less_s: OrLessS = itself) -> Found | None:
    """The best plan of a step that runs all tasks; None: nothing that is asked for fits, or what does is not
    faster than another kind of plan.

    Raises:
        NoPlanError: a MetaOp has no valid allocation, or a task cannot be cut so.
        BelowBoundError: a bug of the planner.
    """
    if asked.equal_shares:
        profile = profile.in_equal_shares()
    cluster = asked.allowed(cluster)
    return or_moving(_with_room(profile, cluster, asked, or_less_s), profile, cluster)


def or_moving(found: Found | None, profile: Profile, cluster: Cluster) -> Found | None:
    """A plan, or a shorter one that moves activations to host memory where it recomputes."""
    if found is None or not cluster.knows_host_links:
        return found
    problem = make_problem(profile.sharded(found.sharding), cluster) if found.cut is None else found.cut.all
    moved = moving_instead(problem, found.best)
    if moved is found.best:
        return found
    before, after = (describe(best.slices) or "" for best in (found.best, moved))
    # What splits layers, or shares out parameters, is said before what recomputes.
    said = (found.note or before).replace(before.removeprefix(ASKS), after.removeprefix(ASKS))
    return replace(found, best=moved, note=said)


def _with_room(profile: Profile, cluster: Cluster, asked: Asked, or_less_s: OrLessS) -> Found | None:
    """The best plan; where memory is short also of those that cut batches and share out parameters."""
    strategy, effort = asked.strategy, asked.effort
    shared_out = profile.sharded(asked.sharding or {})
    found = _in_memory(shared_out, cluster, asked, or_less_s)
    planner = OneTypeCutPlanner(shared_out, cluster, strategy, effort)
    if not asked.gives_up:
        return found
    bound_s = lower_bound(make_problem(profile, cluster)).lower_bound_s
    return with_less(profile, cluster, asked, found, planner, ONE_TYPE, bound_s, or_less_s)


def with_less(
    profile: Profile,
    cluster: Cluster,
    asked: Asked,
    found: Found | None,
    planner: CutPlanner,
    posing: Posing,
    bound_s: float,
    or_less_s: OrLessS,
) -> Found | None:
    """The best plan; where memory is short also of those that cut batches and share out parameters, unless
    there is next to nothing that these could gain. None as `find_asked` says.

    Args:
        found: the best of whole batches, or of the micro-batches asked for, with what is to be shared out.
        planner: of micro-batches, with the same shared out.
        bound_s: before which no schedule of whole batches ends.
    """
    if found is not None and (not found.is_short or found.best.prediction.compute_s <= NEAR_BOUND * bound_s):
        return found
    strategy = asked.strategy
    shared_out = profile.sharded(asked.sharding or {})
    may_share = asked.sharding is None or asked.shares_out_more
    than_s = or_less_s(inf if found is None else found.best.prediction.iteration_s)
    quick = None
    if may_share:
        counts, sharding = asked.micro_batches, asked.sharding
        quick = quick_sharding(profile, cluster, strategy, posing, counts, sharding, than_s)
    if asked.micro_batches is None and not (found is not None and found.is_searched):
        shared_out_s = inf if quick is None else quick.judged.prediction.iteration_s
        known_s = min(than_s, shared_out_s)
        found = in_best_micro_batches(shared_out, posing.divisor(cluster), planner, found, known_s)
    if quick is not None and (found is None or found.is_short):
        is_asked = asked.sharding is not None
        found = in_best_sharding(quick, strategy, asked.effort, found, than_s, is_asked=is_asked)
    return found


def _in_memory(profile: Profile, cluster: Cluster, asked: Asked, or_less_s: OrLessS) -> Found | None:
    """The best plan of whole batches, or of the micro-batches asked for, with what the profile says that
    devices share out.
    """
    if asked.micro_batches is not None:
        planner = OneTypeCutPlanner(profile, cluster, asked.strategy, asked.effort)
        return find_in_asked(planner.cut(asked.micro_batches), planner)
    # What is shared out runs on all devices in any case.
    search = find if asked.equal_shares or gives_up_memory(profile.sharding) else find_on_any_number
    return search(profile, cluster, asked.strategy, asked.effort, or_less_s)
