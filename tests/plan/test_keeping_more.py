"""Which ops keep their activations again, of all that recompute, and which of two plans is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.plan.best.drafts import OneType
from spindle_cli.plan.mixed import find
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.problem import MemoryFallback, Problem, make_problem
from spindle_cli.plan.search.judge import Judged
from spindle_cli.plan.search.memory_fallback import TightPlan, TightProblem
from spindle_cli.plan.strategies.spindle import NO_SEARCH
from spindle_cli.plan.tight.given_up import NEAR, better_searched, with_more_kept
from spindle_cli.plan.tight.keeping_more import keeping_more
from spindle_cli.profile.types import Profile

Recompute = Mapping[str, int]
# Seconds of a plan by what it recomputes; infinite where none fits.
Seconds = Callable[[Recompute], float]


def judged(iteration_s: float) -> Judged:
    return Judged("spindle", (), (), Prediction(iteration_s, iteration_s, 0.0, 0.0, 0.0, 0.0))


@dataclass(frozen=True)
class Taking:
    """A problem whose quick plan takes so long, and one that is searched for `searched` times as long."""

    problem: Problem
    quick_s: float
    searched: float
    lower_bound_s: float = 0.0

    def baselines(self, strategy: str) -> tuple[str, ...]:
        return ()

    def best(self, strategy: str, effort: int, within_s: float = inf) -> tuple[Judged | None, bool]:
        seconds = self.quick_s * (1.0 if effort == NO_SEARCH else self.searched)
        return (None if seconds == inf else judged(seconds)), False


@dataclass(frozen=True)
class TakingAsSaid(OneType):
    """Poses such problems, and keeps what it was asked for."""

    seconds: Seconds
    searched: float = 1.0
    asked: list[dict[str, int]] = field(default_factory=list)

    def posed(self, profile: Profile, cluster: Any, fallback: MemoryFallback | None = None) -> Any:
        counts = {} if fallback is None else dict(fallback.recompute)
        self.asked.append(counts)
        return Taking(make_problem(profile, cluster), self.seconds(counts), self.searched)


# Of all seconds of forward passes a has 0.6, b 0.36, c 0.03 and d 0.01: c is recomputed but never kept again,
# d is never recomputed.
PROFILE = profile_of(
    *(metaop_of(f"t/{name}", 4, {1: seconds}) for name, seconds in zip("abcd", (60, 36, 3, 1), strict=True))
)


def kept(seconds: Seconds) -> tuple[TightPlan | None, list[dict[str, int]]]:
    posing = TakingAsSaid(seconds)
    tight = TightProblem(MemoryFallback(), posing.posed(PROFILE, cluster_of(1)), posing)
    posing.asked.clear()
    return keeping_more(tight, "spindle"), posing.asked


def test_all_that_matters_is_recomputed_first_and_the_longest_is_kept_first() -> None:
    """Whatever is recomputed costs a second for each op: a is kept, then b; c is too short."""
    found, asked = kept(lambda counts: 10.0 + sum(counts.values()))
    assert found is not None
    assert asked == [{"t/a": 4, "t/b": 4, "t/c": 4}, {"t/b": 4, "t/c": 4}, {"t/c": 4}]
    assert found.tight.fallback.recompute == {"t/c": 4}
    assert found.judged.prediction.iteration_s == 14.0


def test_half_is_kept_where_all_does_not_fit_and_what_is_left_is_asked_for_again() -> None:
    """Six ops of a and b have to recompute: half of a is kept, as all of it does not fit, of b nothing."""

    def seconds(counts: Recompute) -> float:
        both = counts.get("t/a", 0) + counts.get("t/b", 0)
        return 10.0 + both if both >= 6 else inf

    found, asked = kept(seconds)
    assert found is not None
    assert found.tight.fallback.recompute == {"t/a": 2, "t/b": 4, "t/c": 4}
    first, second = [{"t/b": 4}, {"t/a": 2, "t/b": 4}, {"t/a": 2}, {"t/a": 2, "t/b": 2}], [{"t/b": 4}]
    wanted = [{"t/a": 4, "t/b": 4}, *first, *second, {"t/a": 1, "t/b": 4}, *first[2:]]
    assert asked == [{**counts, "t/c": 4} for counts in wanted]


def test_what_makes_nothing_faster_recomputes() -> None:
    found, _ = kept(lambda counts: 10.0 if len(counts) == 3 else 10.0 + len(counts))
    assert found is not None
    assert found.tight.fallback.recompute == {"t/a": 4, "t/b": 4, "t/c": 4}


def test_where_nothing_fits_there_is_none() -> None:
    assert kept(lambda _: inf)[0] is None


@pytest.mark.parametrize(("searched", "taken_s"), [(0.9, 9.0), (1.0, 10.0), (1.1, 10.0)])
def test_of_a_quick_plan_and_a_longer_search_the_faster_is_taken(searched: float, taken_s: float) -> None:
    posing = TakingAsSaid(lambda _: 10.0, searched)
    tight = TightProblem(MemoryFallback(), posing.posed(PROFILE, cluster_of(1)), posing)
    found = better_searched(TightPlan(judged(10.0), tight), "spindle", 1)
    assert found.judged.prediction.iteration_s == pytest.approx(taken_s)


@pytest.mark.parametrize(
    ("known_s", "taken_s"),
    [(10.0, 9.0), (8.9, 8.9), (10.0 / NEAR + 0.01, 9.0), (10.0 / NEAR - 0.01, 10.0 / NEAR - 0.01)],
)
def test_a_plan_that_keeps_more_is_searched_for_where_it_comes_near_and_taken_where_it_is_faster(
    known_s: float, taken_s: float
) -> None:
    """Quick ones take 10 s, with a search 9."""
    posing = TakingAsSaid(lambda _: 10.0, 0.9)
    tight = TightProblem(MemoryFallback(), posing.posed(PROFILE, cluster_of(1)), posing)
    found = with_more_kept(TightPlan(judged(known_s), tight), "spindle", 1)
    assert found.judged.prediction.iteration_s == pytest.approx(taken_s)


@pytest.mark.parametrize(("searched", "taken_s"), [(0.9, 9.0), (1.1, 10.0)])
def test_of_what_recomputes_alike_a_quick_plan_may_be_the_faster_one(searched: float, taken_s: float) -> None:
    posing: Any = TakingAsSaid(lambda _: 10.0, searched)
    found = find._recomputing_alike(PROFILE, cluster_of(1), "spindle", 1, posing, inf)
    assert found is not None
    assert found.judged.prediction.iteration_s == pytest.approx(taken_s)


def test_where_memory_is_short_on_several_types_ops_are_kept_again() -> None:
    """Any plan that recomputes b, but not a, takes half as long as others."""

    def seconds(counts: Recompute) -> float:
        return 5.0 if "t/b" in counts and "t/a" not in counts else 10.0

    posing: Any = TakingAsSaid(seconds)
    found = find._tight(PROFILE, cluster_of(1), "spindle", 1, posing, inf)
    assert found is not None
    assert found.judged.prediction.iteration_s == 5.0
    assert found.tight.fallback.recompute == {"t/b": 4, "t/c": 4}
