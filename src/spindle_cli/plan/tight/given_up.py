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
    selects,
    splits_in_turn,
)
from spindle_cli.plan.search.posed import Posed, Posing
from spindle_cli.plan.strategies.spindle import NO_SEARCH
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import Profile

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
    return better_searched(quick, strategy, effort)


def better_searched(quick: TightPlan, strategy: StrategyName, effort: int) -> TightPlan:
    """A quick plan, or a better one of a longer search, whose schedules may have no good place in memory."""
    searched, _ = quick.tight.posed.best(strategy, effort)
    if searched is None or quick.judged.rank() <= searched.rank():
        return quick
    return replace(quick, judged=searched)


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
    """The best of quick searches of the first split that has a plan, which what no schedule is shorter than
    says is the fastest. Without `recomputes` layers may be split alone.

    Ops that are recomputed in part save something of all tasks for little time. Where nothing fits so, what
    recomputes does so whole, which saves all of one task at its fullest moment.

    Args:
        than_s: what is not faster may be left out.
    """
    selective = recomputes and any(map(selects, profile.metaops))
    least = _least(profile, cluster, strategy, posing, recomputes, selective, than_s)
    if least is None and selective:
        return _least(profile, cluster, strategy, posing, recomputes, False, than_s)
    return least


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
    for split in splits_in_turn(profile, cluster, posing, than_s / (1 + ABOVE_BOUND)):
        if not may_be_faster(split.posed, than_s):
            break
        if recomputes:
            least = _least_recomputing(replace(split, selects=selective), strategy, than_s)
        else:
            least = _recomputing(split, 0, strategy, than_s)
        if least is not None:
            return least
    return None


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
