"""The best plan of those that give up speed for memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TypeAlias

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.search.memory_fallback import (
    STEPS,
    TightPlan,
    TightProblem,
    recomputing,
    selective_steps,
    selects,
    splits_in_turn,
)
from spindle_cli.plan.search.posed import Posed, Posing
from spindle_cli.plan.strategies.spindle import NO_SEARCH
from spindle_cli.plan.tight.keeping_more import keeping_more
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import Profile

# Where memory asks for a fallback, so many ways to split layers are planned and the best one kept.
SPLITS_COMPARED = 3
MORE_STEPS = (1, 2, 4, 8)
# Where memory is short, the iteration of a plan is longer than the lower bound by at least this share of it.
ABOVE_BOUND = 0.02
# A longer search makes a quick plan that takes more than this many times as long as another no faster.
NEAR = 1.05
# Of the iteration of the best plan known, that, or a shorter one of another kind of plan: what is not faster
# may be left out.
OrLessS: TypeAlias = Callable[[float], float]


def itself(known_s: float) -> float:
    """Where there is no other kind of plan."""
    return known_s


def with_fallback(
    profile: Profile,
    cluster: Cluster,
    strategy: StrategyName,
    effort: int,
    posing: Posing,
    than_s: float = inf,
    or_less_s: OrLessS = itself,
) -> TightPlan | None:
    """The best plan of those that give up speed for memory, split and cheapest first; None if none fits, or
    comes near `than_s`, or another kind of plan: what is not faster may be left out.
    """
    quick = least_fallback(profile, cluster, strategy, posing, than_s=than_s)
    if quick is None:
        return None
    quick_s = quick.judged.prediction.iteration_s
    if quick_s > NEAR * than_s or quick_s > NEAR * or_less_s(quick_s):
        return None
    best = better_searched(quick, strategy, effort)
    return best if effort == NO_SEARCH else _less_split(best, profile, cluster, strategy, effort, posing)


def _less_split(
    best: TightPlan, profile: Profile, cluster: Cluster, strategy: StrategyName, effort: int, posing: Posing
) -> TightPlan:
    """A plan, or a better one of the fastest split whose bound is much shorter: of a split that recomputes
    nothing a longer search may find a schedule that has a place, where a quick one does not.
    """
    iteration_s = best.judged.prediction.iteration_s
    for split in splits_in_turn(profile, cluster, posing, lambda: iteration_s / NEAR):
        if split.posed.lower_bound_s * NEAR > iteration_s:
            break
        if split.fallback.split and split.fallback != best.tight.fallback:
            judged, _ = split.posed.best(strategy, effort)
            found = best if judged is None else TightPlan(judged, split)
            return min(best, found, key=lambda each: each.judged.rank())
    return best


def better_searched(quick: TightPlan, strategy: StrategyName, effort: int) -> TightPlan:
    """A quick plan, or a better one of a longer search, whose schedules may have no good place in memory."""
    searched, _ = quick.tight.posed.best(strategy, effort)
    if searched is None or quick.judged.rank() <= searched.rank():
        return quick
    return replace(quick, judged=searched)


def with_more_kept(plan: TightPlan, strategy: StrategyName, effort: int) -> TightPlan:
    """A plan that recomputes, or a better one that recomputes less (`keeping_more.py`)."""
    quick = keeping_more(plan.tight, strategy)
    if quick is None or quick.judged.prediction.iteration_s > NEAR * plan.judged.prediction.iteration_s:
        return plan
    return min(plan, better_searched(quick, strategy, effort), key=lambda each: each.judged.rank())


def may_be_faster(posed: Posed, than_s: float) -> bool:
    """Whether a plan of a problem that memory is short for may take less than so long."""
    return than_s == inf or posed.lower_bound_s * (1 + ABOVE_BOUND) < than_s


def least_fallback(
    profile: Profile,
    cluster: Cluster,
    strategy: StrategyName,
    posing: Posing,
    *,
    recomputes: bool = True,
    than_s: float = inf,
) -> TightPlan | None:
    """The best of quick searches. Without `recomputes` layers may be split alone.

    Ops that are recomputed in part save something of all tasks for little time; ops that are recomputed whole
    save all of one task, which may be what is missing at the fullest moment. So both are tried; on several
    types of device, where each takes long, the latter by plans of their own (`best/find_asked.py`).

    Args:
        than_s: what is not faster may be left out.
    """
    ways: tuple[bool, ...] = (False,)
    if recomputes and any(map(selects, profile.metaops)):
        ways = (True,) if cluster.is_mixed else (True, False)
    best: TightPlan | None = None
    for way in ways:
        known_s = than_s if best is None else min(than_s, best.judged.prediction.iteration_s)
        least = _least(profile, cluster, strategy, posing, recomputes, way, known_s)
        if least is not None and (best is None or least.judged.rank() < best.judged.rank()):
            best = least
    return best


def _least(
    profile: Profile,
    cluster: Cluster,
    strategy: StrategyName,
    posing: Posing,
    recomputes: bool,
    selective: bool,
    than_s: float,
) -> TightPlan | None:
    """The best where what recomputes may keep what takes longest, or where nothing does."""
    found: list[TightPlan] = []

    def fastest_s() -> float:
        return min((plan.judged.prediction.iteration_s for plan in found), default=inf)

    def within_s() -> float:
        return min(fastest_s(), than_s / (1 + ABOVE_BOUND))

    def no_longer_than_s() -> float:
        return min(fastest_s(), than_s)

    for split in splits_in_turn(profile, cluster, posing, within_s):
        if len(found) == SPLITS_COMPARED or split.posed.lower_bound_s >= fastest_s():
            break
        if not may_be_faster(split.posed, no_longer_than_s()):
            break
        if recomputes:
            least = _least_recomputing(replace(split, selects=selective), strategy, no_longer_than_s())
        else:
            least = _recomputing(split, 0, strategy, no_longer_than_s())
        if least is not None:
            found.append(least)
    if not found:
        return None
    best = min(found, key=lambda plan: plan.judged.rank())
    if not recomputes:
        return best
    # Plans that spread memory less evenly fit only with some more recomputation, and may be faster
    # nevertheless; and what recomputes nothing that takes long is soon worth it.
    cheap = max(best.step, selective_steps(best.tight))
    steps = {cheap, *(begin + more for begin in (best.step, cheap) for more in MORE_STEPS)} - {best.step}
    for step in sorted(steps):
        more = _recomputing(best.tight, step, strategy, no_longer_than_s())
        found += [] if more is None else [more]
    return min(found, key=lambda plan: plan.judged.rank())


def _recomputing(
    split: TightProblem, step: int, strategy: StrategyName, than_s: float = inf
) -> TightPlan | None:
    tight = recomputing(split, step) if step <= STEPS else None
    if tight is None or not may_be_faster(tight.posed, than_s):
        return None
    return _quick_plan(tight, step, strategy, than_s)


def _quick_plan(
    tight: TightProblem, step: int, strategy: StrategyName, than_s: float = inf
) -> TightPlan | None:
    judged, _ = tight.posed.best(strategy, NO_SEARCH, than_s)
    return None if judged is None else TightPlan(judged, tight, step)


def _least_recomputing(split: TightProblem, strategy: StrategyName, than_s: float) -> TightPlan | None:
    """The plan that recomputes least of those that fit, found by halving; None if all of it does not fit, or
    if what fits recomputes so much that it is not faster than `than_s`.

    Whether any plan fits is asked of the baselines first, which take least time to find. What recomputes more
    has other schedules, some of which find no place where one that recomputes less does: so a plan that
    recomputes nothing is looked for by itself.
    """
    if split.fallback.split:  # without a split, that has been tried
        nothing = _recomputing(split, 0, strategy, than_s)
        if nothing is not None:
            return nothing
    least: tuple[int, TightProblem, TightPlan | None] | None = None
    low = 1
    high = step = STEPS
    while low <= high:
        tight = recomputing(split, step)
        if tight is not None and not may_be_faster(tight.posed, than_s):
            high, step = step - 1, (low + step - 1) // 2
            continue
        by_baseline = tight is not None and _fits_by_baseline(tight, strategy)
        plan = None if tight is None or by_baseline else _quick_plan(tight, step, strategy)
        if tight is not None and (by_baseline or plan is not None):
            least, high = (step, tight, plan), step - 1
        else:
            low = step + 1
        step = (low + high) // 2
    if least is None:
        return None
    step, tight, plan = least
    return plan or _quick_plan(tight, step, strategy)


def _fits_by_baseline(tight: TightProblem, strategy: StrategyName) -> bool:
    return any(tight.posed.by_baseline(name) is not None for name in tight.posed.baselines(strategy))
