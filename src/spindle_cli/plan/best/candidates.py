"""The best plan of a problem by a strategy: of its candidates, placed and evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import chain
from math import inf

from spindle_cli.errors import NoPlanError
from spindle_cli.plan.best.in_memory import leaves_much
from spindle_cli.plan.bound.bound import Bound
from spindle_cli.plan.pipelines.candidates import may_gain, pipelines
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Candidate
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, best_of, best_placed, evaluate
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.strategies.baselines import baseline as baseline_of
from spindle_cli.plan.strategies.baselines import baselines_on
from spindle_cli.plan.strategies.spindle import spindle
from spindle_cli.plan.types import StrategyName


def by_baseline(problem: Problem, strategy: StrategyName) -> EvaluatedCandidate | None:
    """The plan of a strategy that searches nothing; None if it does not fit, or the strategy has none here,
    which is no reason for others to have none.
    """
    try:
        return evaluate(problem, baseline_of(problem, strategy))
    except NoPlanError:
        return None


def best_evaluated(
    problem: Problem,
    bound: Bound,
    strategy: StrategyName,
    effort: int,
    baseline: Callable[[StrategyName], EvaluatedCandidate | None] | None = None,
    within_s: float = inf,
) -> tuple[EvaluatedCandidate | None, bool]:
    """The best plan that fits, or None; and whether memory stood in no candidate's way (see
    `best_of_each`).
    """
    plans, all_fit = best_of_each(problem, bound, strategy, effort, baseline, within_s)
    return next(iter(plans), None), all_fit


def best_of_each(
    problem: Problem,
    bound: Bound,
    strategy: StrategyName,
    effort: int,
    baseline: Callable[[StrategyName], EvaluatedCandidate | None] | None = None,
    within_s: float = inf,
    *,
    is_searched_on: bool = False,
) -> tuple[list[EvaluatedCandidate], bool]:
    """The best plan that fits of each kind of candidates, the best first; and whether memory stood in no
    candidate's way.

    `spindle` considers the other strategies' plans too.

    Args:
        baseline: `by_baseline` of the problem, where some of its plans may be known already.
        within_s: the iteration of a plan that is known; schedules that take longer are not placed.
        is_searched_on: whether a search over everything begins from what leaves much to it.
    """
    baseline = baseline or partial(by_baseline, problem)
    of_kinds = [[baseline(name)] for name in baselines_on(problem.cluster) if strategy in (name, "spindle")]
    if strategy == "spindle":
        _add_searched(of_kinds, problem, bound, effort, within_s, is_searched_on=is_searched_on)
    all_fit = _all_fit(of_kinds)
    if strategy == "spindle" and effort != NO_SEARCH:
        best = _least(chain.from_iterable(of_kinds))
        if best is None or may_gain(best.prediction, bound.lower_bound_s):
            least_s = min(within_s, _least_s(of_kinds))
            of_kinds.append([evaluate(problem, pipeline) for pipeline in pipelines(problem, effort, least_s)])
    best_of_kinds = [best for best in map(_least, of_kinds) if best is not None]
    return sorted(best_of_kinds, key=EvaluatedCandidate.rank), all_fit


def _add_searched(
    of_kinds: list[list[EvaluatedCandidate | None]],
    problem: Problem,
    bound: Bound,
    effort: int,
    within_s: float,
    *,
    is_searched_on: bool,
) -> None:
    """Add the plans of what searches find, placed with care where no search over everything goes on from
    them.
    """
    placed = cache(partial(best_placed, problem))
    by_search: dict[int, Sequence[Candidate]] = {}
    for number, candidates in enumerate(spindle(problem, bound, effort)):
        least_s = min(within_s, _least_s(of_kinds))
        # What is only there to begin with stays as it is, as what a search finds is shorter.
        if effort != NO_SEARCH and number > 0:
            by_search[len(of_kinds)] = candidates
        of_kinds.append(best_of(problem, candidates, placed, with_care=False, within_s=least_s))
        if number == 1 and not any(of_kinds[-1]):
            break  # nothing of a whole search fits: a longer one will not help
    if is_searched_on and _is_far(of_kinds, bound):
        return
    for kind, searched in by_search.items():
        least_s = min(within_s, _least_s(of_kinds))
        of_kinds[kind] = best_of(problem, searched, placed, with_care=True, within_s=least_s)


def _is_far(of_kinds: Sequence[Sequence[EvaluatedCandidate | None]], bound: Bound) -> bool:
    """Whether the best of some plans leaves much to a search over everything."""
    return leaves_much(_least_s(of_kinds), bound.lower_bound_s, all_fit=_all_fit(of_kinds))


def _all_fit(of_kinds: Iterable[Iterable[EvaluatedCandidate | None]]) -> bool:
    """Whether memory stood in the way of none of the plans."""
    return all(plan is not None and not plan.is_apart for plan in chain.from_iterable(of_kinds))


def _least_s(of_kinds: Iterable[Iterable[EvaluatedCandidate | None]]) -> float:
    """Seconds of the shortest iteration of all."""
    best = _least(chain.from_iterable(of_kinds))
    return inf if best is None else best.prediction.iteration_s


def _least(plans: Iterable[EvaluatedCandidate | None]) -> EvaluatedCandidate | None:
    return min(
        (evaluated for evaluated in plans if evaluated is not None), key=EvaluatedCandidate.rank, default=None
    )
