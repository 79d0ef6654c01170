"""The best plan of a problem by a strategy: of its drafts, placed and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.sharding import points_on_all
from spindle_cli.plan.bound.bound import Bound, lower_bound
from spindle_cli.plan.pipelines.drafts import may_gain, pipelines
from spindle_cli.plan.problem import MemoryFallback, Problem, make_problem
from spindle_cli.plan.schedule import Draft
from spindle_cli.plan.search.judge import Judged, best_of, judge
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.strategies.distmm import distmm
from spindle_cli.plan.strategies.optimus import optimus
from spindle_cli.plan.strategies.sequential import sequential
from spindle_cli.plan.strategies.spindle import spindle
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile

BASELINES: Mapping[StrategyName, Callable[[Problem], Draft]] = {
    "sequential": sequential,
    "distmm": distmm,
    "optimus": optimus,
}


def by_baseline(problem: Problem, strategy: StrategyName) -> Judged | None:
    """The plan of another strategy than `spindle`; None if it does not fit."""
    return judge(problem, BASELINES[strategy](problem))


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

    baseline = baseline or partial(by_baseline, problem)
    found = [[baseline(name)] for name in BASELINES if strategy in (name, "spindle")]
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


@dataclass(frozen=True)
class PosedOnOneType:
    """A problem on devices of one type (`search/posed.py`)."""

    problem: Problem

    @cached_property
    def bound(self) -> Bound:
        return lower_bound(self.problem)

    @property
    def lower_bound_s(self) -> float:
        return self.bound.lower_bound_s

    def least_s(self, split: MemoryFallback) -> float:  # noqa: ARG002 - that of all schedules is one of these
        return self.lower_bound_s

    def baselines(self, strategy: StrategyName) -> tuple[StrategyName, ...]:
        return tuple(name for name in BASELINES if strategy in (name, "spindle"))

    @cached_property
    def _by_baseline(self) -> dict[StrategyName, Judged | None]:
        return {}

    def by_baseline(self, strategy: StrategyName) -> Judged | None:
        if strategy not in self._by_baseline:
            self._by_baseline[strategy] = by_baseline(self.problem, strategy)
        return self._by_baseline[strategy]

    def best(self, strategy: StrategyName, effort: int, within_s: float = inf) -> tuple[Judged | None, bool]:
        return best_judged(self.problem, self.bound, strategy, effort, self.by_baseline, within_s)


class OneType:
    """Devices of one type (`search/posed.py`)."""

    def problem(self, profile: Profile, cluster: Cluster, fallback: MemoryFallback | None = None) -> Problem:
        return make_problem(profile, cluster, fallback)

    def posed(
        self, profile: Profile, cluster: Cluster, fallback: MemoryFallback | None = None
    ) -> PosedOnOneType:
        return PosedOnOneType(make_problem(profile, cluster, fallback))

    def on_all(
        self, metaops: Sequence[MetaOpProfile], cluster: Cluster
    ) -> Sequence[Mapping[str, CurvePoint]]:
        return points_on_all(metaops, cluster)

    def divisor(self, cluster: Cluster) -> int:
        return cluster.num_devices


ONE_TYPE = OneType()
