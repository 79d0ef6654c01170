"""The best plan of those that are asked for: also of micro-batches, with parameters shared out and with
activations in host memory, where memory is short.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
from spindle_cli.plan.best.find_sharded import QuickSharding, in_best_sharding, quick_sharding
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
    sharing = SharedQuickly(profile, cluster, asked, ONE_TYPE, or_less_s)
    return or_moving(_with_room(profile, cluster, asked, sharing), profile, cluster)


@dataclass
class SharedQuickly:
    """The best quick plan that shares out parameters or gradients, made when it is first asked for: it is
    found soon, and of a third kind of plans, which take longer to find, what is not faster is then left out.

    Attributes:
        other_less_s: of the iteration of a plan that is known, that, or a shorter one of a third kind.
    """

    profile: Profile
    cluster: Cluster
    asked: Asked
    posing: Posing
    other_less_s: OrLessS = itself
    _known: list[QuickSharding | None] = field(default_factory=list)

    def or_less_s(self, known_s: float) -> float:
        """Seconds of a plan of a third kind that is faster than this one and what is known, or `known_s`:
        what only this one is faster than may become so itself by a longer search.
        """
        quick = self.quick(known_s)
        least_s = known_s if quick is None else min(known_s, quick.judged.prediction.iteration_s)
        found_s = self.other_less_s(least_s)
        return found_s if found_s < least_s else known_s

    def quick(self, than_s: float) -> QuickSharding | None:
        """The quick plan; None: there is none, or none that may be faster than `than_s`, where it is first
        asked for, or something else is asked for.
        """
        asked = self.asked
        if not asked.gives_up or not (asked.sharding is None or asked.shares_out_more):
            return None
        if not self._known:
            ways = asked.micro_batches, asked.sharding
            found = quick_sharding(self.profile, self.cluster, asked.strategy, self.posing, *ways, than_s)
            self._known.append(found)
        return self._known[0]


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


def _with_room(profile: Profile, cluster: Cluster, asked: Asked, sharing: SharedQuickly) -> Found | None:
    """The best plan; where memory is short also of those that cut batches and share out parameters."""
    strategy, effort = asked.strategy, asked.effort
    shared_out = profile.sharded(asked.sharding or {})
    found = _in_memory(shared_out, cluster, asked, sharing.or_less_s)
    planner = OneTypeCutPlanner(shared_out, cluster, strategy, effort)
    if not asked.gives_up:
        return found
    bound_s = lower_bound(make_problem(profile, cluster)).lower_bound_s
    return with_less(profile, cluster, asked, found, planner, sharing, bound_s)


def with_less(
    profile: Profile,
    cluster: Cluster,
    asked: Asked,
    found: Found | None,
    planner: CutPlanner,
    sharing: SharedQuickly,
    bound_s: float,
) -> Found | None:
    """The best plan; where memory is short also of those that cut batches and share out parameters, unless
    there is next to nothing that these could gain. None as `find_asked` says.

    Args:
        found: the best of whole batches, or of the micro-batches asked for, with what is to be shared out.
        planner: of micro-batches, with the same shared out.
        sharing: the best quick plan that shares out more.
        bound_s: before which no schedule of whole batches ends.
    """
    if found is not None and (not found.is_short or found.best.prediction.compute_s <= NEAR_BOUND * bound_s):
        return found
    than_s = sharing.or_less_s(inf if found is None else found.best.prediction.iteration_s)
    quick = sharing.quick(than_s)
    if asked.micro_batches is None and not (found is not None and found.is_searched):
        shared_out = profile.sharded(asked.sharding or {})
        divisor = sharing.posing.divisor(cluster)
        known_s = than_s if quick is None else min(than_s, quick.judged.prediction.iteration_s)
        found = in_best_micro_batches(shared_out, divisor, planner, found, known_s)
    if quick is not None and (found is None or found.is_short):
        is_asked = asked.sharding is not None
        found = in_best_sharding(quick, asked.strategy, asked.effort, found, than_s, is_asked=is_asked)
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
