"""The best plan of a problem by a strategy: of its drafts, placed and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf

from spindle_cli.plan.bound.bound import Bound
from spindle_cli.plan.pipelines.drafts import may_gain, pipelines
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Draft
from spindle_cli.plan.search.judge import Judged, best_of, judge
from spindle_cli.plan.search.spread import spread_out
from spindle_cli.plan.strategies.component_lanes import component_lanes
from spindle_cli.plan.strategies.distmm import distmm
from spindle_cli.plan.strategies.optimus import optimus
from spindle_cli.plan.strategies.sequential import sequential
from spindle_cli.plan.strategies.spindle import NO_SEARCH, spindle
from spindle_cli.plan.types import StrategyName

BASELINES: Mapping[StrategyName, Callable[[Problem], Draft]] = {
    "sequential": sequential,
    "distmm": distmm,
    "optimus": optimus,
}


def best_judged(
    problem: Problem, bound: Bound, strategy: StrategyName, effort: int
) -> tuple[Judged | None, bool]:
    """The best plan that fits, or None; and whether memory stood in no draft's way.

    `spindle` considers the other strategies' plans too.
    """
    found: list[list[Judged | None]] = []
    for name, baseline in BASELINES.items():
        if strategy in (name, "spindle"):
            found.append([judge(problem, baseline(problem))])
    if strategy == "spindle":
        for number, drafts in enumerate(spindle(problem, bound, effort)):
            found.append(best_of(problem, drafts, with_care=effort != NO_SEARCH))
            if number == 1 and not any(found[-1]):
                break  # nothing of a whole search fits: a longer one will not help
    all_fit = all(judged is not None and not judged.is_apart for each in found for judged in each)
    if strategy == "spindle" and effort != NO_SEARCH:
        found.append([judge(problem, draft) for draft in component_lanes(problem)])
        best = _least(judged for each in found for judged in each)
        if best is None or may_gain(best.prediction, bound.lower_bound_s):
            longest_s = inf if best is None else best.prediction.iteration_s
            found.append([judge(problem, draft) for draft in pipelines(problem, effort, longest_s)])
    spread = [spread_out(problem, best) for each in found if (best := _least(each)) is not None]
    return _least(spread), all_fit  # of equals the first: a baseline


def _least(found: Iterable[Judged | None]) -> Judged | None:
    return min((judged for judged in found if judged is not None), key=Judged.rank, default=None)
