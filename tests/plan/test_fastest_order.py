"""Of several orders of passes the best is found, measured or not."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.ordering.orders import as_they_come, in_groups, mirrored
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search import evaluate as judging
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, best_of, fastest, measure_as_they_are
from spindle_cli.plan.strategies.spindle import spindle
from spindle_cli.plan.types import Slice


def placed(seed: int) -> tuple[Problem, EvaluatedCandidate, list[tuple[Slice, ...]]]:
    """A plan of some tasks, and its slices in several orders, some of them twice."""
    random = Random(seed)
    curve = {1: 4.0, 2: random.choice((2.0, 3.0)), 4: random.choice((1.0, 2.5))}
    tasks = [metaop_of(f"{task}/net", random.randrange(1, 5), curve) for task in "abcd"]
    problem = make_problem(profile_of(*tasks), cluster_of(4))
    candidates = next(iter(spindle(problem, lower_bound(problem), 0)))
    evaluated = next(each for each in best_of(problem, candidates) if each is not None)
    orders = [
        tuple(mirrored(range(len(evaluated.slices)))),
        *(as_they_come(problem, evaluated.slices, longest_first=longest) for longest in (True, False)),
        *in_groups(problem, evaluated.slices),
    ]
    candidates = [timed(problem, evaluated.slices, order) for order in (*orders, *orders)]
    random.shuffle(candidates)
    return problem, evaluated, candidates


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_the_fastest_is_the_least_of_all(seed: int) -> None:
    problem, _, candidates = placed(seed)
    measured = [measure_as_they_are(problem, "spindle", slices) for slices in candidates]
    least = min((each for each in measured if each is not None), key=EvaluatedCandidate.rank)
    assert fastest(problem, "spindle", candidates) == least
    within_s = least.prediction.iteration_s
    assert fastest(problem, "spindle", candidates, within_s=within_s) == least
    assert fastest(problem, "spindle", [], within_s=within_s) is None


def test_what_ends_later_than_it_may_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, evaluated, candidates = placed(0)
    ends_s = min(max(piece.last_s for piece in slices) for slices in candidates)
    monkeypatch.setattr(judging, "measure_as_they_are", lambda *_: pytest.fail("was measured"))
    assert fastest(problem, evaluated.strategy, candidates, within_s=ends_s * 0.999) is None


def test_equal_candidates_are_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _, _ = placed(1)
    candidates = next(iter(spindle(problem, lower_bound(problem), 0)))
    placements: list[object] = []
    original = judging.best_placed

    def counted(problem: Problem, *arguments: object) -> EvaluatedCandidate | None:
        placements.append(arguments)
        return original(problem, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(judging, "best_placed", counted)
    once = best_of(problem, candidates)
    number = len(placements)
    twice = best_of(problem, [candidate for candidate in candidates for _ in range(2)])
    assert len(set(placements[number:])) == len(placements[number:])
    assert {each.rank() for each in twice if each} == {each.rank() for each in once if each}
