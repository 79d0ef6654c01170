"""Quick plans that give up something for memory, and from which of them the search goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.cut import cuttable
from helpers.plans import cluster_of, profile_of
from plan.test_memory_fallback import net, split
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.in_memory import NEAR_BOUND
from spindle_cli.plan.best.micro_batches import in_micro_batches
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.best.request import PlanRequest
from spindle_cli.plan.best.seeds import ALIKE, Seed, Seeds
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import MemoryFallback, Problem
from spindle_cli.plan.search.evaluate import EvaluatedCandidate
from spindle_cli.plan.search.memory_fallback import NEAR
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.profile.types import Profile


def seeds_of(profile: Profile, num_devices: int, posing: Any) -> Seeds:
    cluster = cluster_of(num_devices)
    cut = partial(in_micro_batches, cluster=cluster)
    return Seeds(profile, cluster, PlanRequest(), posing, cut)


def taking(seconds: float) -> EvaluatedCandidate:
    return EvaluatedCandidate("spindle", (), (), Prediction(seconds, seconds, 0.0, 0.0, 0.0, 0.0))


@dataclass(frozen=True)
class FitsFrom:
    """A problem whose plans fit from so many recomputed ops on, and take as many seconds."""

    problem: Problem
    ops: int
    for_baselines: int
    for_search: int
    lower_bound_s: float = 1.0

    def least_s(self, split: MemoryFallback) -> float:
        return self.lower_bound_s

    def baselines(self, strategy: str) -> tuple[str, ...]:
        return ("sequential",)

    def by_baseline(self, strategy: str) -> EvaluatedCandidate | None:
        return self._plan() if self.ops >= self.for_baselines else None

    def best(
        self, strategy: str, effort: int, within_s: float = inf
    ) -> tuple[EvaluatedCandidate | None, bool]:
        return self._plan() if self.ops >= self.for_search else None, False

    def _plan(self) -> EvaluatedCandidate:
        return taking(float(self.ops))


@dataclass(frozen=True)
class FittingFrom(ProblemPoser):
    """Poses such problems."""

    for_baselines: int
    for_search: int

    def posed(self, profile: Profile, cluster: Any, fallback: MemoryFallback | None = None) -> Any:
        ops = 0 if fallback is None else sum(fallback.recompute.values())
        problem = make_problem(profile, cluster, fallback)
        return FitsFrom(problem, ops, self.for_baselines, self.for_search)


@pytest.mark.parametrize("least", [1, 2, 5, 6, 7, 8, 15, 16])
@pytest.mark.parametrize("for_baselines", [0, 3, 99])
def test_the_least_recomputation_that_fits_any_plan_is_found(least: int, for_baselines: int) -> None:
    """Of 16 ops, a step each; a search's plans may fit where no baseline's does."""
    posing = FittingFrom(max(least, for_baselines), least)
    found = seeds_of(profile_of(net("a/m", 16, 5)), 2, posing).splitting(inf)
    assert found is not None
    assert sum(found.saving.fallback.recompute.values()) == least


@pytest.mark.parametrize("least", [1, 2, 17, 31, 32, 33, 62, 64])
def test_room_is_found_to_a_step(least: int) -> None:
    """Of 64 ops, a step each."""
    found = seeds_of(profile_of(net("a/m", 64, 5)), 2, FittingFrom(least, least)).splitting(inf)
    assert found is not None
    assert sum(found.saving.fallback.recompute.values()) == least


@dataclass(frozen=True)
class SlowBaseline(FitsFrom):
    """A problem whose baseline takes 100 s."""

    def by_baseline(self, strategy: str) -> EvaluatedCandidate | None:
        return taking(100.0) if self.ops >= self.for_baselines else None


class SlowBaselines(FittingFrom):
    """Poses such problems."""

    def posed(self, profile: Profile, cluster: Any, fallback: MemoryFallback | None = None) -> Any:
        posed = super().posed(profile, cluster, fallback)
        return SlowBaseline(posed.problem, posed.ops, posed.for_baselines, posed.for_search)


def test_with_less_room_than_a_baseline_needs_what_is_faster_may_fit() -> None:
    """From 4 of 16 ops on the baseline fits, and from 6 on what takes as many seconds."""
    found = seeds_of(profile_of(net("a/m", 16, 5)), 2, SlowBaselines(4, 6)).splitting(inf)
    assert found is not None
    assert found.seconds == 6.0


def test_where_nothing_fits_there_is_no_fallback() -> None:
    posing = FittingFrom(99, 99)
    assert seeds_of(profile_of(net("a/m", 16, 5)), 2, posing).splitting(inf) is None


@dataclass(frozen=True)
class SplitFittingBut(FittingFrom):
    """Poses problems whose plans fit with layers split, but with so many recomputed ops of them."""

    none_fits: range = range(0)

    def posed(self, profile: Profile, cluster: Any, fallback: MemoryFallback | None = None) -> Any:
        posed = super().posed(profile, cluster, fallback)
        is_split = fallback is not None and bool(fallback.split)
        least = 0 if is_split and posed.ops not in self.none_fits else 99
        return replace(posed, for_baselines=99, for_search=least)


@pytest.mark.parametrize(("none_fits", "least"), [(range(1, 12), 0), (range(12), 12), (range(11), 11)])
def test_where_layers_are_split_nothing_is_recomputed_if_that_fits_whatever_else_does_not(
    none_fits: range, least: int
) -> None:
    """Halving alone would ask 16, 8 and 12 of 16 ops, and never none."""
    profile = profile_of(split(net("a/m", 16, 5), 2))
    found = seeds_of(profile, 2, SplitFittingBut(0, 0, none_fits)).splitting(inf)
    assert found is not None and found.saving.fallback.split
    assert sum(found.saving.fallback.recompute.values()) == least


@dataclass(frozen=True)
class OfDegree(FitsFrom):
    """A problem whose quick plan takes so long, and one of a longer search as said; 0: there is none."""

    quick_s: float = 0.0
    searched_s: float = 0.0

    def best(
        self, strategy: str, effort: int, within_s: float = inf
    ) -> tuple[EvaluatedCandidate | None, bool]:
        seconds = self.quick_s if effort == NO_SEARCH else self.searched_s
        return (taking(seconds) if seconds and not self.ops else None), False


@dataclass(frozen=True)
class OfDegrees(ProblemPoser):
    """Poses such problems: by the degree of tensor parallelism of layers the bound, and what a plan takes
    that recomputes nothing, a quick one and one of a longer search.
    """

    seconds: Mapping[int, tuple[float, float, float]]

    def posed(self, profile: Profile, cluster: Any, fallback: MemoryFallback | None = None) -> Any:
        fallback = fallback or MemoryFallback()
        bound_s, *plans_s = self.seconds[fallback.least_tp]
        ops = sum(fallback.recompute.values())
        return OfDegree(make_problem(profile, cluster, fallback), ops, 99, 0, bound_s, *plans_s)


OF_TWO_OR_FOUR = profile_of(split(split(net("a/m", 16, 5), 2), 4))


@pytest.mark.parametrize(
    ("quick_s", "degree"), [((0.0, 9.0, 8.0), 4), ((0.0, 9.0, 0.0), 2), ((0.0, 0.0, 0.0), None)]
)
def test_the_split_with_the_shortest_bound_that_has_a_plan_is_taken(
    quick_s: tuple[float, ...], degree: int | None
) -> None:
    """Bounds are 1 s without a split, 3 s with layers in two, 2 s with layers in four."""
    seconds = {
        tp: (bound_s, own_s, own_s)
        for tp, bound_s, own_s in zip((1, 2, 4), (1.0, 3.0, 2.0), quick_s, strict=True)
    }
    found = seeds_of(OF_TWO_OR_FOUR, 4, OfDegrees(seconds)).splitting(inf)
    assert (None if found is None else found.saving.fallback.least_tp) == degree


def test_splits_whose_bound_leaves_no_chance_are_left_out() -> None:
    """Of 5 s that are known a plan of layers in two would take 3 s, but its bound is 4.91 s."""
    seconds = {1: (1.0, 0.0, 0.0), 2: (4.91, 3.0, 3.0), 4: (4.89, 0.0, 0.0)}
    for than_s, degree in ((5.0, None), (5.1, 2)):
        found = seeds_of(OF_TWO_OR_FOUR, 4, OfDegrees(seconds)).splitting(than_s)
        assert (None if found is None else found.saving.fallback.least_tp) == degree


@dataclass(frozen=True)
class BySamples(ProblemPoser):
    """Poses problems of micro-batches of so many samples whose quick plans take so long; None: none fits."""

    seconds: Mapping[int, float | None]

    def posed(self, profile: Profile, cluster: Any, fallback: MemoryFallback | None = None) -> Any:
        seconds = self.seconds.get(profile.metaops[0].batch_size)
        fits_from = 99 if seconds is None else 0
        return OfDegree(make_problem(profile, cluster, fallback), 0, 99, fits_from, 1.0, seconds or 0.0)


@pytest.mark.parametrize(
    ("seconds", "count"),
    [((3, 5, 2), 4), ((3, 5, 6, 1), 2), ((5, 3, 4, 4, 1), 3), ((None, 5, 6, 4), 6)],
)
def test_more_micro_batches_alike_are_tried_until_two_in_a_row_gain_nothing(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float | None, ...], count: int
) -> None:
    """In 2, 3, 4, 6 and 8; None: that does not fit."""
    monkeypatch.setattr("spindle_cli.plan.best.seeds.in_rounds", lambda _, one: one)
    profile = profile_of(cuttable("t/net", 1, {n: 1.0 for n in range(1, 49) if 48 % n == 0}))
    by_samples = {48 // each: own_s for each, own_s in zip(ALIKE, seconds, strict=False)}
    found = seeds_of(profile, 1, BySamples(by_samples)).alike()
    assert found is not None
    assert found.saving.cut.counts == {"t": count}


def found_of(compute_s: float, *, is_short: bool = True, is_searched: bool = False) -> PlanResult:
    return PlanResult(taking(compute_s), is_short, is_searched=is_searched)


def or_better(
    monkeypatch: pytest.MonkeyPatch,
    found: PlanResult | None,
    seeds_s: tuple[float, float],
    or_less_s: float = inf,
) -> tuple[PlanResult | None, list[float]]:
    """What is made of a plan, and of which seeds the search went on: of one that is sharded as is asked for
    and of one that is sharded more, which takes 1 s off.
    """
    as_requested, more = (Seed(taking(seconds), SimpleNamespace()) for seconds in seeds_s)  # type: ignore[arg-type]
    searched: list[float] = []

    def search(_: Seeds, seed: Seed) -> PlanResult:
        searched.append(seed.seconds)
        return found_of(seed.seconds - 1)

    monkeypatch.setattr(Seeds, "sharded_as_requested", lambda *_: as_requested)
    monkeypatch.setattr(Seeds, "sharded_more", lambda _: more)
    monkeypatch.setattr(Seeds, "_searched", search)
    seeds = seeds_of(profile_of(net("a/m", 1, 1)), 1, None)
    return seeds.or_better(found, 10.0, lambda known_s: min(known_s, or_less_s)), searched


def test_the_search_goes_on_from_seeds_that_come_near_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far: more than 5 % longer than a plan, than another seed, or than another kind of plan."""
    best, searched = or_better(monkeypatch, None, (20.0, 20.0 * NEAR))
    assert searched == [20.0, 20.0 * NEAR]
    assert best is not None and best.best.prediction.iteration_s == 19.0
    assert or_better(monkeypatch, None, (20.0, 20.1 * NEAR))[1] == [20.0]
    assert or_better(monkeypatch, None, (20.1 * NEAR, 20.0))[1] == [20.0]
    assert or_better(monkeypatch, found_of(20.0), (21.1, 20.9))[1] == [20.9]
    assert or_better(monkeypatch, None, (20.9, 21.1), or_less_s=20.0)[1] == [20.9]
    known = found_of(18.0)
    assert or_better(monkeypatch, known, (18.1, 18.2))[0] is not known
    assert or_better(monkeypatch, known, (19.0, 19.1)) == (known, [])


def test_nothing_is_given_up_near_the_bound_or_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is 10 s; where a search has made up for short memory, no more is recomputed or cut."""
    seeds_s = 9.0, 8.0
    near, far = found_of(NEAR_BOUND * 10.0), found_of(NEAR_BOUND * 10.01)
    assert or_better(monkeypatch, near, seeds_s) == (near, [])
    assert or_better(monkeypatch, far, seeds_s)[1] == [8.0]
    with_room = found_of(20.0, is_short=False)
    assert or_better(monkeypatch, with_room, seeds_s) == (with_room, [])
    assert or_better(monkeypatch, found_of(20.0, is_searched=True), (8.0, 8.1))[1] == [8.1]
