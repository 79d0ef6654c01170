"""What is given up where memory is short: how many ops recompute, which MetaOps are split, what is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of, slice_of
from spindle_cli.plan.best.drafts import ONE_TYPE, OneType
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.problem import MemoryFallback, Problem, make_problem
from spindle_cli.plan.search.judge import Judged
from spindle_cli.plan.search.memory_fallback import (
    NEAR,
    describe,
    given_up,
    heaviest,
    largest_fallback,
    least_bytes,
    least_fallback,
    splits,
    with_fallback,
)
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile

MIB = 2**20


def net(name: str, num_ops: int, kept_mib: int, forward_s: float = 1.0, **more: Any) -> MetaOpProfile:
    """Ops that keep so much and hand on 1 MiB, on one device or two."""
    sizes = {"activation_bytes_per_op": kept_mib * MIB, "inner_output_bytes": MIB}
    return metaop_of(name, num_ops, {1: 3 * forward_s, 2: 2 * forward_s}, **(sizes | more))


def recomputed_ops_of(profile: Profile, share: float) -> dict[str, int]:
    """Where nothing can be moved to host memory."""
    given = given_up(profile, share)
    assert given == MemoryFallback(recompute=given.recompute)
    return dict(given.recompute)


def test_who_saves_most_for_a_second_recomputes_first_and_the_last_only_as_much_as_needed() -> None:
    """a saves 4 MiB an op for 2 s, b 3 MiB for 1 s, c nothing: 12 + 9 MiB in all."""
    profile = profile_of(net("a/m", 3, 5, 2.0), net("b/m", 3, 4, 1.0), net("c/m", 3, 1))
    assert recomputed_ops_of(profile, 0.0) == {}
    assert recomputed_ops_of(profile, 3 / 21) == {"b/m": 1}
    assert recomputed_ops_of(profile, 3.01 / 21) == {"b/m": 2}
    assert recomputed_ops_of(profile, 9 / 21) == {"b/m": 3}
    assert recomputed_ops_of(profile, 13.1 / 21) == {"b/m": 3, "a/m": 2}
    assert recomputed_ops_of(profile, 1.0) == {"b/m": 3, "a/m": 3}


def test_of_curves_that_begin_with_several_devices_the_seconds_of_all_count() -> None:
    """a saves 4 MiB for 2 x 1 s, b 3 MiB for 1 s."""
    on_two = metaop_of("a/m", 1, {2: 3.0}, activation_bytes_per_op=5 * MIB, inner_output_bytes=MIB)
    assert recomputed_ops_of(profile_of(on_two, net("b/m", 1, 4)), 0.1) == {"b/m": 1}


@pytest.mark.parametrize(
    ("share", "names"), [(0.5, "b"), (0.6, "b"), (0.61, "ba"), (0.9, "ba"), (0.95, "bac"), (1.0, "bac")]
)
def test_the_heaviest_are_taken_until_they_have_the_share(share: float, names: str) -> None:
    assert heaviest({"a": 30, "b": 60, "c": 10, "d": 0}, share) == frozenset(names)


def split(metaop: MetaOpProfile, tp: int) -> MetaOpProfile:
    point = CurvePoint(num_devices=tp, dp=1, tp=tp, forward_s=0.4, backward_s=0.8, source="measured")
    return metaop.model_copy(update={"curve": (*metaop.curve, point)})


def test_each_degree_splits_the_metaops_with_most_parameters_then_all() -> None:
    """Of 3 x 1, 2 x 4 and 1 x 2 MiB the second has 8 of 13."""
    profile = profile_of(
        split(net("a/m", 3, 1), 2),
        split(net("b/m", 2, 1, param_bytes_per_op=4 * MIB), 4),
        split(net("c/m", 1, 1, param_bytes_per_op=2 * MIB), 2),
    )
    found = splits(profile, cluster_of(4), ONE_TYPE)
    heavy, everything = frozenset({"b/m"}), frozenset({"a/m", "b/m", "c/m"})
    fallbacks = [(tight.fallback.least_tp, tight.fallback.split) for tight in found]
    assert len(fallbacks) == 5
    assert set(fallbacks) == {(1, frozenset()), (2, heavy), (2, everything), (4, heavy), (4, everything)}
    bounds = [tight.posed.lower_bound_s for tight in found]
    assert bounds == sorted(bounds)


def test_the_largest_fallback_splits_as_far_as_any_curve_goes_and_recomputes_every_op() -> None:
    profile = profile_of(split(net("a/m", 3, 1), 2), split(net("b/m", 2, 1), 4))
    found = largest_fallback(profile)
    assert (found.least_tp, found.split) == (4, {"a/m", "b/m"})
    assert found.recompute == {"a/m": 3, "b/m": 2}


def test_at_least_every_parameter_is_held_once_with_its_state_and_the_activations_of_a_task() -> None:
    """a and b share three blocks of 1 MiB, of which b trains half, and a's first has 2 MiB of glue; a keeps 5
    MiB an op, b 4. Tasks may be run one behind the other.
    """
    a = net("a/m", 3, 5, parameters="p", extra_param_bytes={0: 2 * MIB})
    b = net("b/m", 3, 4, parameters="p", trainable_fraction=0.5)
    problem = make_problem(profile_of(a, b), cluster_of(2))
    assert least_bytes(problem) / MIB == (3 + 1 + 1) * (1 + 2) + 3 * 5
    with_inner = make_problem(profile_of(a, b), cluster_of(2), MemoryFallback(recompute={"a/m": 3}))
    assert least_bytes(with_inner) / MIB == (3 + 1 + 1) * (1 + 2) + 3 * 4


def test_a_plan_says_what_it_gave_up() -> None:
    slices = [
        slice_of(metaop, (0, metaop.num_ops), (0,), 0.0, recompute=True)
        for metaop in (net("a/m", 2, 5), net("b/m", 3, 5))
    ]
    assert describe(slices, MemoryFallback(4, frozenset("ab"))) == (
        "Memory asks for tensor parallelism of at least 4 in 2 MetaOps and recomputed activations of 5 ops."
    )
    assert describe(slices[:1]) == "Memory asks for recomputed activations of 2 ops."
    assert describe([], MemoryFallback(2, frozenset("a"))) == (
        "Memory asks for tensor parallelism of at least 2 in 1 MetaOps."
    )


def taking(seconds: float) -> Judged:
    return Judged("spindle", (), (), Prediction(seconds, seconds, 0.0, 0.0, 0.0, 0.0))


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

    def by_baseline(self, strategy: str) -> Judged | None:
        return self._plan() if self.ops >= self.for_baselines else None

    def best(self, strategy: str, effort: int, within_s: float = inf) -> tuple[Judged | None, bool]:
        return self._plan() if self.ops >= self.for_search else None, False

    def _plan(self) -> Judged:
        return taking(float(self.ops))


@dataclass(frozen=True)
class FittingFrom(OneType):
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
    found = least_fallback(profile_of(net("a/m", 16, 5)), cluster_of(2), "spindle", posing)
    assert found is not None
    assert sum(found.tight.fallback.recompute.values()) == least


def test_where_nothing_fits_there_is_no_fallback() -> None:
    posing = FittingFrom(99, 99)
    assert least_fallback(profile_of(net("a/m", 16, 5)), cluster_of(2), "spindle", posing) is None


@dataclass(frozen=True)
class EightSeconds(FitsFrom):
    """A problem whose plans take 8 s: none is found within less."""

    def best(self, strategy: str, effort: int, within_s: float = inf) -> tuple[Judged | None, bool]:
        return (None if within_s < 8.0 else taking(8.0)), False


class OfEightSeconds(OneType):
    """Poses such problems."""

    def posed(self, profile: Profile, cluster: Any, fallback: MemoryFallback | None = None) -> Any:
        return EightSeconds(make_problem(profile, cluster, fallback), 0, 99, 0)


@pytest.mark.parametrize(("than_s", "is_found"), [(inf, True), (8.0, True), (7.9, False)])
def test_what_is_no_slower_than_a_known_plan_is_found(than_s: float, is_found: bool) -> None:
    profile = profile_of(net("a/m", 16, 5))
    found = least_fallback(
        profile, cluster_of(2), "spindle", OfEightSeconds(), recomputes=False, than_s=than_s
    )
    assert (found is not None) is is_found


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
    found = least_fallback(profile, cluster_of(2), "spindle", SplitFittingBut(0, 0, none_fits))
    assert found is not None and found.tight.fallback.split
    assert sum(found.tight.fallback.recompute.values()) == least


@dataclass(frozen=True)
class OfDegree(FitsFrom):
    """A problem whose quick plan takes so long, and one of a longer search as said; 0: there is none."""

    quick_s: float = 0.0
    searched_s: float = 0.0

    def best(self, strategy: str, effort: int, within_s: float = inf) -> tuple[Judged | None, bool]:
        seconds = self.quick_s if effort == NO_SEARCH else self.searched_s
        return (taking(seconds) if seconds and not self.ops else None), False


@dataclass(frozen=True)
class OfDegrees(OneType):
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
    found = least_fallback(OF_TWO_OR_FOUR, cluster_of(4), "spindle", OfDegrees(seconds))
    assert (None if found is None else found.tight.fallback.least_tp) == degree


def test_splits_whose_bound_leaves_no_chance_are_left_out() -> None:
    """Of 5 s that are known a plan of layers in two would take 3 s, but its bound is 4.91 s."""
    seconds = {1: (1.0, 0.0, 0.0), 2: (4.91, 3.0, 3.0), 4: (4.89, 0.0, 0.0)}
    for than_s, degree in ((5.0, None), (5.1, 2)):
        found = least_fallback(OF_TWO_OR_FOUR, cluster_of(4), "spindle", OfDegrees(seconds), than_s=than_s)
        assert (None if found is None else found.tight.fallback.least_tp) == degree


@pytest.mark.parametrize(("searched_s", "taken_s"), [(9.0, 9.0), (10.0, 10.0), (11.0, 10.0), (0.0, 10.0)])
def test_of_a_quick_plan_and_a_longer_search_the_faster_is_taken(searched_s: float, taken_s: float) -> None:
    """Of schedules of a longer search none may have a place in memory."""
    seconds = {1: (1.0, 0.0, 0.0), 2: (1.0, 10.0, searched_s), 4: (1.0, 0.0, 0.0)}
    found = with_fallback(OF_TWO_OR_FOUR, cluster_of(4), "spindle", 1, OfDegrees(seconds))
    assert found is not None
    assert found.judged.prediction.iteration_s == taken_s


@pytest.mark.parametrize(
    ("others_s", "is_searched"), [(10.0 / NEAR + 0.01, True), (10.0 / NEAR - 0.01, False)]
)
def test_a_quick_plan_far_from_another_kind_of_plan_is_not_searched_for_longer(
    others_s: float, *, is_searched: bool
) -> None:
    """Quick ones take 10 s, with a search 5."""
    seconds = {1: (1.0, 0.0, 0.0), 2: (1.0, 10.0, 5.0), 4: (1.0, 0.0, 0.0)}
    posing = OfDegrees(seconds)
    found = with_fallback(OF_TWO_OR_FOUR, cluster_of(4), "spindle", 1, posing, or_less_s=lambda _: others_s)
    assert (None if found is None else found.judged.prediction.iteration_s) == (5.0 if is_searched else None)
