"""The best plan of a problem by a strategy: of its drafts, placed and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf

from spindle_cli.errors import NoPlanError
from spindle_cli.plan.bound.bound import Bound
from spindle_cli.plan.pipelines.drafts import may_gain, pipelines
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.judge import Judged, best_of, judge
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.strategies.baselines import baseline as baseline_of
from spindle_cli.plan.strategies.baselines import baselines_on
from spindle_cli.plan.strategies.spindle import spindle
from spindle_cli.plan.types import StrategyName


def by_baseline(problem: Problem, strategy: StrategyName) -> Judged | None:
    """The plan of a strategy that searches nothing; None if it does not fit, or the strategy has none here,
    which is no reason for others to have none.
    """
    try:
        return judge(problem, baseline_of(problem, strategy))
    except NoPlanError:
        return None


def best_judged(
    problem: Problem,
    bound: Bound,
    strategy: StrategyName,
    effort: int,
    baseline: Callable[[StrategyName], Judged | None] | None = None,
    within_s: float = inf,
) -> tuple[Judged | None, bool]:
    """The best plan that fits, or None; and whether memory stood in no draft's way (see `best_of_each`)."""
    found, all_fit = best_of_each(problem, bound, strategy, effort, baseline, within_s)
    return next(iter(found), None), all_fit


def best_of_each(
    problem: Problem,
    bound: Bound,
    strategy: StrategyName,
    effort: int,
    baseline: Callable[[StrategyName], Judged | None] | None = None,
    within_s: float = inf,
) -> tuple[list[Judged], bool]:
    """The best plan that fits of each kind of drafts, the best first; and whether memory stood in no draft's
    way.

    `spindle` considers the other strategies' plans too.

    Args:
        baseline: `by_baseline` of the problem, where some of its plans may be known already.
        within_s: the iteration of a plan that is known; schedules that take longer are not placed.
    """

    def least_s() -> float:
        return min(within_s, _least_s(found))

    if baseline is None:
        baseline = partial(by_baseline, problem)
    names = [name for name in baselines_on(problem.cluster) if strategy in (name, "spindle")]
    found = [[baseline(name)] for name in names]
    if strategy == "spindle":
        for number, drafts in enumerate(spindle(problem, bound, effort)):
            # What is only there to begin with is placed quickly, as what a search finds is shorter.
            care = effort != NO_SEARCH and number > 0
            found.append(best_of(problem, drafts, with_care=care, within_s=least_s()))
            if number == 1 and not any(found[-1]):
                break  # nothing of a whole search fits: a longer one will not help
    all_fit = all(judged is not None and not judged.is_apart for each in found for judged in each)
    if strategy == "spindle" and effort != NO_SEARCH:
        best = _least(judged for each in found for judged in each)
        if best is None or may_gain(best.prediction, bound.lower_bound_s):
            found.append([judge(problem, draft) for draft in pipelines(problem, effort, least_s())])
    return sorted((best for each in found if (best := _least(each)) is not None), key=Judged.rank), all_fit


def _least_s(found: Iterable[Iterable[Judged | None]]) -> float:
    """Seconds of the shortest iteration of all."""
    best = _least(judged for each in found for judged in each)
    return inf if best is None else best.prediction.iteration_s


def _least(found: Iterable[Judged | None]) -> Judged | None:
    return min((judged for judged in found if judged is not None), key=Judged.rank, default=None)
