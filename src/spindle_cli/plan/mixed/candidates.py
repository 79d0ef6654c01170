"""The best plan of a problem on devices of several types, of its schedules and baselines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import TypeAlias

from spindle_cli.errors import NoPlanError
from spindle_cli.plan.bound.bound import Bound
from spindle_cli.plan.mixed.search import search
from spindle_cli.plan.pipelines.candidates import FAR_ON_SEVERAL_TYPES, may_gain, pipelines
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Candidate
from spindle_cli.plan.search.evaluate import CARE_BRINGS_ON_TYPES, EvaluatedCandidate, best_of, evaluate
from spindle_cli.plan.search.listing import Timed, to_pieces
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.strategies.baselines import baseline, baselines_on
from spindle_cli.plan.types import StrategyName

# Jobs dispatched in a search for schedules of each kind, for each type beyond the first: more types have more
# allocations to choose from.
BASE_JOBS = 6_000
# Of schedules searched for so many are worth placing.
MOST_PLACED = 8
# Where memory is short many problems are searched, one behind the other: schedules that mix allocations by
# this part of the effort.
PART_IN_SHORT_MEMORY = 0.5
# Memory is no longer short if so much of the iteration is all that more of it would save.
MEMORY_IS_WORTH = 0.01
# Many problems that give up something are asked for quickly: of these, schedules that mix allocations are
# searched for from this level of effort on.
MIXES_FROM_LEVEL = 1


_Schedules: TypeAlias = Sequence[Sequence[Timed]]


@dataclass(frozen=True)
class CandidatesOnTypes:
    """What schedules of a problem on devices of several types are made, and placed.

    Attributes:
        bound: of the problem.
    """

    problem: Problem
    bound: Bound

    def best(
        self, strategy: StrategyName, effort: int, within_s: float = inf
    ) -> tuple[EvaluatedCandidate | None, bool]:
        """Return the best plan; more effort has the schedules of more searches, NO_SEARCH those of none.

        The second says whether memory stood in the way of none: neither of a plain schedule of the search,
        nor of a baseline's that ends before the best iteration; or, of a search, not in the way of one that
        would be worth giving up anything. No other baseline's could be faster, so none is placed.

        Raises:
            NoPlanError: the strategy has no plan on these types.
        """
        if strategy != "spindle":
            evaluated = evaluate(self.problem, baseline(self.problem, strategy))
            return evaluated, evaluated is not None and not evaluated.is_apart
        placed = _Placed(self.problem, with_care=effort != NO_SEARCH, within_s=within_s)
        plain, mixing = self._schedules(effort)
        placed.others += placed.best_of(mixing)
        placed.plain += placed.best_of(plain)
        placed.add_baselines(self._baseline_candidates())
        best = self._or_pipeline(placed.best, effort)
        all_fit = all(evaluated is not None and not evaluated.is_apart for evaluated in placed.plain)
        if all_fit or best is None or effort == NO_SEARCH:
            return best, all_fit
        return best, _iteration_s(best) <= (1 + MEMORY_IS_WORTH) * self._with_ample_memory_s(plain)

    def _with_ample_memory_s(self, plain: _Schedules) -> float:
        """The best iteration of plain schedules and baselines, if memory were no limit."""
        ample = replace(self.problem, cluster=self.problem.cluster.with_ample_memory())
        placed = _Placed(ample, with_care=True)
        placed.plain += placed.best_of(plain)
        placed.add_baselines(self._baseline_candidates())
        return placed.best_s

    def _or_pipeline(self, best: EvaluatedCandidate | None, effort: int) -> EvaluatedCandidate | None:
        """The best plan, or a pipeline where one is faster; it holds less than other plans, so problems that
        give something up for memory are not asked for one.
        """
        if effort == NO_SEARCH or self.problem.fallback.gives_up:
            return best
        if best is not None and not may_gain(best.prediction, self.bound.lower_bound_s, FAR_ON_SEVERAL_TYPES):
            return best
        # Where nothing else fits, what does is found soon or not at all.
        candidates = pipelines(self.problem, 0 if best is None else effort, _iteration_s(best))
        evaluated = (
            evaluate(self.problem, candidate) for candidate in candidates if self._uses_all(candidate)
        )
        return _best_of([best, *evaluated])

    def _uses_all(self, candidate: Candidate) -> bool:
        """Whether a candidate leaves no node idle; what gains by that is planned for parts of the cluster."""
        node_of = self.problem.cluster.node_of
        used = {node_of[device] for devices in candidate.devices or () for device in devices}
        return len(used) == len(set(node_of))

    def _schedules(self, effort: int) -> tuple[_Schedules, _Schedules]:
        """Plain schedules, and such as mix allocations."""
        part = PART_IN_SHORT_MEMORY if self.problem.fallback.gives_up else 1.0
        mixes_from = MIXES_FROM_LEVEL if self.problem.fallback.gives_up else 0
        plain: list[Sequence[Timed]] = []
        mixing: list[Sequence[Timed]] = []
        jobs_tried, base = 0, BASE_JOBS * max(1, len(self.problem.cluster.types) - 1)
        for level in range(max(effort, 0) + 1):
            jobs_tried = 0 if effort == NO_SEARCH else base * 4**level
            plain += search(self.problem, self.bound, jobs_tried, level, mixes=False)
            if level >= mixes_from:
                mixing += search(self.problem, self.bound, int(part * jobs_tried), level, mixes=True)
        return _shortest(plain), _shortest(mixing)

    def _baseline_candidates(self) -> list[Candidate]:
        """Return the candidate of each baseline, and its schedule with the devices left to the placement."""
        baselines = []
        for name in baselines_on(self.problem.cluster):
            with suppress(NoPlanError):  # one that has no plan here is no reason to have none
                baselines.append(baseline(self.problem, name))
        return [
            either
            for candidate in baselines
            for either in (candidate, Candidate("spindle", candidate.pieces))
        ]


@dataclass
class _Placed:
    """What has been placed of a problem's schedules.

    Attributes:
        plain: of plain schedules and of baselines, which show whether memory stood in the way.
        others: of others.
        within_s: the iteration of a plan that is known of another problem; what takes longer is not placed.
    """

    problem: Problem
    with_care: bool
    within_s: float = inf
    plain: list[EvaluatedCandidate | None] = field(default_factory=list)
    others: list[EvaluatedCandidate | None] = field(default_factory=list)

    @property
    def best(self) -> EvaluatedCandidate | None:
        return _best_of([*self.others, *self.plain])

    @property
    def best_s(self) -> float:
        """The shortest iteration that is known: what takes longer gains nothing."""
        return min(self.within_s, _iteration_s(self.best))

    def best_of(self, schedules: Sequence[Sequence[Timed]]) -> list[EvaluatedCandidate | None]:
        """Those that may be faster than the best so far, on devices that are left to the placement."""
        candidates = [Candidate("spindle", to_pieces(self.problem, timed)) for timed in schedules]
        return best_of(
            self.problem,
            [candidate for candidate in candidates if candidate.end_s < self.best_s],
            with_care=self.with_care,
            within_s=self.best_s,
            care_brings=CARE_BRINGS_ON_TYPES,
        )

    def add_baselines(self, candidates: Iterable[Candidate]) -> None:
        """Those that end before the best iteration."""
        placed: list[tuple[EvaluatedCandidate | None, float]] = []
        for candidate in sorted(candidates, key=_end_s):
            if _end_s(candidate) >= self.best_s:
                break
            placed.append((evaluate(self.problem, candidate), _end_s(candidate)))
            self.others.append(placed[-1][0])
        self.plain += [evaluated for evaluated, end_s in placed if end_s < self.best_s]


def _shortest(schedules: _Schedules) -> _Schedules:
    """Those that are worth placing, the shortest first, each once."""
    different = dict.fromkeys(map(tuple, schedules))
    return sorted(different, key=lambda timed: max(end_s for _, _, end_s in timed))[:MOST_PLACED]


def _best_of(plans: Iterable[EvaluatedCandidate | None]) -> EvaluatedCandidate | None:
    return min((plan for plan in plans if plan is not None), key=EvaluatedCandidate.rank, default=None)


def _iteration_s(evaluated: EvaluatedCandidate | None) -> float:
    return inf if evaluated is None else evaluated.prediction.iteration_s


def _end_s(candidate: Candidate) -> float:
    """Before which no iteration with a candidate's schedule ends."""
    return max(slice_.end_s for slice_ in candidate.pieces)
