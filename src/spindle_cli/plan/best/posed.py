"""Problems with how plans of them are found (`search/posed.py`), on devices of one type or several."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

from spindle_cli.costs.shares import Same
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.candidates import best_evaluated, best_of_each, by_baseline
from spindle_cli.plan.bound.bound import Bound, lower_bound, lower_bound_under
from spindle_cli.plan.mixed import candidates as on_types
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import MemoryFallback, Problem
from spindle_cli.plan.search.evaluate import EvaluatedCandidate
from spindle_cli.plan.search.spread import all_spread_out
from spindle_cli.plan.strategies.baselines import baselines_on
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import Profile


@dataclass(frozen=True)
class PosedProblem:
    """A problem, and how plans of it are found."""

    problem: Problem

    @cached_property
    def bound(self) -> Bound:
        """Return what the program proves of its schedules of whole batches."""
        return lower_bound(self.problem)

    @property
    def lower_bound_s(self) -> float:
        return self.bound.lower_bound_s

    @property
    def _is_mixed(self) -> bool:
        return self.problem.cluster.is_mixed

    def least_s(self, split: MemoryFallback) -> float:
        if not self._is_mixed or self.problem.fallback.gives_up:
            return self.lower_bound_s  # that of all schedules is one of these
        return lower_bound_under(self.problem, self.bound, split)

    def baselines(self, strategy: StrategyName) -> tuple[StrategyName, ...]:
        names = baselines_on(self.problem.cluster)
        return tuple(name for name in names if strategy in (name, "spindle"))

    @cached_property
    def _by_baseline(self) -> dict[StrategyName, EvaluatedCandidate | None]:
        return {}

    def by_baseline(self, strategy: StrategyName) -> EvaluatedCandidate | None:
        if strategy not in self._by_baseline:
            self._by_baseline[strategy] = by_baseline(self.problem, strategy)
        return self._by_baseline[strategy]

    def best_of_each(self, strategy: StrategyName, effort: int) -> tuple[list[EvaluatedCandidate], bool]:
        """The best plans to go on from, the best first; and whether memory stood in no candidate's way."""
        if self._is_mixed:
            best, all_fit = self.best(strategy, effort)
            return [] if best is None else [best], all_fit
        plans, all_fit = best_of_each(
            self.problem, self.bound, strategy, effort, self.by_baseline, is_searched_on=True
        )
        return all_spread_out(self.problem, plans), all_fit

    def best(
        self, strategy: StrategyName, effort: int, within_s: float = inf
    ) -> tuple[EvaluatedCandidate | None, bool]:
        if self._is_mixed:
            return on_types.CandidatesOnTypes(self.problem, self.bound).best(strategy, effort, within_s)
        return best_evaluated(self.problem, self.bound, strategy, effort, self.by_baseline, within_s)


class ProblemPoser:
    """Makes problems of profiles. On several types what splits layers alone is asked for again, by one way
    after another to give up something, so that it is kept.
    """

    def __init__(self) -> None:
        self._posed: dict[object, PosedProblem] = {}

    def posed(
        self, profile: Profile, cluster: Cluster, fallback: MemoryFallback | None = None
    ) -> PosedProblem:
        fallback = fallback or MemoryFallback()
        if fallback.keeps_less or not cluster.is_mixed:
            return PosedProblem(make_problem(profile, cluster, fallback))
        key = Same(profile), Same(cluster), fallback.least_tp, fallback.split
        if key not in self._posed:
            self._posed[key] = PosedProblem(make_problem(profile, cluster, fallback))
        return self._posed[key]
