"""Whether speed is given up for memory: not where all fits, or a search makes up for it, and only for what is
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of, slice_of
from helpers.several_types import metaop_on_types, plan_in_rows, profile_on_types
from spindle_cli.plan import make
from spindle_cli.plan.best.in_memory import NEAR_SEARCHED, InMemory, in_memory
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.evaluate import EvaluatedCandidate
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.types import Plan

NET = metaop_of("t/net", 4, {1: 1.0})
PROFILE, ONE = profile_of(NET), cluster_of(1)
PROBLEM = make_problem(PROFILE, ONE)
LOWER_S = 4.0


def evaluated(iteration_s: float, *, recompute: bool = False) -> EvaluatedCandidate:
    slices = (slice_of(NET, (0, 4), (0,), 0.0, recompute=recompute),)
    return EvaluatedCandidate("spindle", slices, (), Prediction(iteration_s, iteration_s, 0.0, 0.0, 0.0, 0.0))


def found(begins: list[EvaluatedCandidate], *, effort: int, all_fit: bool) -> InMemory | None:
    return in_memory(PROBLEM, LOWER_S, begins, "spindle", effort, all_fit=all_fit)


def searching(monkeypatch: pytest.MonkeyPatch, result: EvaluatedCandidate | None) -> None:
    def refined(
        problem: Problem, begins: Iterable[EvaluatedCandidate], effort: int
    ) -> EvaluatedCandidate | None:
        return result

    monkeypatch.setattr("spindle_cli.plan.refine.search.refined", refined)


def test_without_a_search_the_best_that_fits_is_taken() -> None:
    assert found([], effort=1, all_fit=False) is None
    best = found([evaluated(6.0), evaluated(7.0)], effort=NO_SEARCH, all_fit=False)
    assert best is not None and best.best.prediction.iteration_s == 6.0


@pytest.mark.parametrize(
    ("searched_s", "recompute", "gives_up"),
    [
        (LOWER_S * NEAR_SEARCHED * 0.999, True, False),  # as near to the bound as can be asked for
        (LOWER_S * NEAR_SEARCHED * 1.001, True, True),
        (8.0 * 0.949, False, False),  # much shorter, and recomputes nothing
        (8.0 * 0.949, True, True),
        (8.0 * 0.951, False, True),
    ],
)
def test_a_search_that_gets_near_or_makes_much_shorter_is_enough(
    searched_s: float, recompute: bool, gives_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    searching(monkeypatch, evaluated(searched_s, recompute=recompute))
    best = found([evaluated(8.0)], effort=1, all_fit=False)
    assert best is not None and best.best.prediction.iteration_s == searched_s
    assert best.is_searched is not gives_up


@pytest.mark.parametrize(("share", "is_short"), [(0.0, False), (0.03, False), (0.031, True), (1.0, True)])
def test_other_parts_of_optimizer_state_are_tried_where_more_than_three_percent_is_recomputed(
    share: float, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = metaop_on_types("t/net", 4, {"fast": 1.0, "slow": 1.0}, batch_size=2)
    plan = plan_in_rows(net, (0, 1, 2), recompute=True)
    request: list[bool] = []

    def with_best_weights(_: Any, __: Any, ___: Any, ____: Any, is_short: Callable[[Plan], bool]) -> Plan:
        request.append(is_short(plan))
        return plan

    monkeypatch.setattr(make, "with_best_weights", with_best_weights)
    monkeypatch.setattr(make, "recomputed_share", lambda slices, *_: share if slices == plan.slices else None)
    make_plan(profile_on_types(net), plan.cluster)
    assert request == [is_short]


@pytest.mark.parametrize(
    ("begin", "all_fit", "is_searched"),
    [(1.19, True, False), (1.21, True, True), (1.04, False, True), (1.02, False, False)],
)
def test_what_is_near_the_bound_is_not_searched_for_further(
    begin: float, all_fit: bool, is_searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 20 % of it where memory is ample, within 3 % where it is short."""
    shorter = evaluated(LOWER_S)
    searching(monkeypatch, shorter)
    best = found([evaluated(begin * LOWER_S)], effort=1, all_fit=all_fit)
    assert best is not None
    assert (best.best == shorter) == is_searched
