"""What a dispatch over several types takes, worked out by hand: by prices that change, at the boundary of
what widening may cost, mixed, as in the linear program's optimum, and backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest

from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.bound.pricing import Column
from spindle_cli.plan.mixed import candidates as on_types
from spindle_cli.plan.mixed import search as search_module
from spindle_cli.plan.mixed.dispatch import (
    FEWEST_LEFT,
    FEWEST_OPS,
    OPTIMUM_LATE,
    WIDEN_COST,
    MixedDispatcher,
    MixedGuide,
    optimum_ops,
)
from spindle_cli.plan.mixed.search import search
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import MemoryFallback, Problem
from spindle_cli.plan.schedule import Candidate
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, best_of
from spindle_cli.plan.search.listing import Timed
from spindle_cli.plan.search.posed import NO_SEARCH

Allocation = tuple[tuple[int, int], float]  # devices of each type, seconds of an op


def dispatcher_of(
    *allocations: Allocation,
    num_ops: int = 1,
    optimum: Sequence[tuple[Column, float]] = (),
    wanted_s: float = 2.0,
) -> MixedDispatcher:
    """Of one MetaOp, on a device of each type, a second of either worth the same; `wanted_s` of the iteration
    are for each of its ops.
    """
    points = [SimpleNamespace(counts=counts, op_s=op_s) for counts, op_s in allocations]
    node = SimpleNamespace(index=0, num_ops=num_ops, inputs=(), consumers=(), points=points)
    cluster = SimpleNamespace(types=("fast", "slow"), num_of_type={"fast": 1, "slow": 1})
    problem = SimpleNamespace(nodes=[node], order=(0,), cluster=cluster)
    bound = SimpleNamespace(
        prices=(1.0, 1.0), op_s=(wanted_s,), lower_bound_s=num_ops * wanted_s, ops=(optimum,)
    )
    return MixedDispatcher(problem, bound)  # type: ignore[arg-type]  # stand-ins


def guide(*, mixes: bool = True, follows_optimum: bool = False) -> MixedGuide:
    """One that changes nothing, for a MetaOp."""
    return MixedGuide(0.0, 2.0, (1.0,), (1.0,), (1.0, 1.0), mixes, follows_optimum)


def taken(dispatcher: MixedDispatcher, prices: tuple[float, float] = (1.0, 1.0)) -> int:
    """Which of its allocations the MetaOp runs on."""
    ((_, point, _), _, _), *others = dispatcher.run(MixedGuide(0.0, 2.0, (1.0,), (1.0,), prices))[0]
    assert not others
    return point


def test_other_prices_choose_again_among_the_same_allocations() -> None:
    dispatcher = dispatcher_of(((1, 0), 2.0), ((0, 1), 2.0))
    assert [taken(dispatcher, prices) for prices in ((1.0, 2.0), (2.0, 1.0), (1.0, 2.0))] == [0, 1, 0]


@pytest.mark.parametrize(("op_s", "is_widened"), [(1.5, True), (1.5001, False), (1.4999, True)])
def test_idle_devices_are_taken_for_half_as_much_again_and_no_more(op_s: float, is_widened: bool) -> None:
    """One device is in time, for 2 device-seconds; two cost 3 where they take 1.5 s."""
    assert WIDEN_COST == 1.5
    assert taken(dispatcher_of(((1, 0), 2.0), ((1, 1), op_s))) == int(is_widened)


def test_ops_are_mixed_so_that_they_end_in_time() -> None:
    """2 s an op are wanted: of 10 ops 6 in 1.8 s on both devices, then 4 in 2.3 s on the slow one."""
    timed, end_s = dispatcher_of(((0, 1), 2.3), ((1, 1), 1.8), num_ops=10).run(guide())
    assert [job for job, _, _ in timed] == [(0, 1, 6), (0, 0, 4)]
    assert end_s == pytest.approx(20.0)


def test_without_mixing_all_ops_run_on_what_is_fast_enough() -> None:
    timed, end_s = dispatcher_of(((0, 1), 2.3), ((1, 1), 1.8), num_ops=10).run(guide(mixes=False))
    assert [job for job, _, _ in timed] == [(0, 1, 10)]
    assert end_s == pytest.approx(18.0)


def test_a_share_of_a_guide_counts_more_than_that_of_a_mix() -> None:
    dispatcher = dispatcher_of(((0, 1), 2.3), ((1, 1), 1.8), num_ops=10)
    timed, _ = dispatcher.run(replace(guide(), shares={(0, 0): 0.5}))
    assert timed[0] == ((0, 1, 5), 0.0, 9.0)


def test_what_the_optimum_uses_is_taken_as_long_as_ops_of_it_are_left() -> None:
    """Both types alike: by prices the first of equals, in the optimum 3 of 4 ops on the slow one."""
    optimum = ((Column(2.0, (1.0, 0.0)), 1.0), (Column(2.0, (0.0, 1.0)), 3.0))
    dispatcher = dispatcher_of(((1, 0), 2.0), ((0, 1), 2.0), num_ops=4, optimum=optimum)
    assert [job for job, _, _ in dispatcher.run(guide())[0]] == [(0, 0, 4)]
    for _ in range(2):  # each run with all of it
        timed, _ = dispatcher.run(guide(follows_optimum=True))
        assert [job for job, _, _ in timed] == [(0, 1, 3), (0, 0, 1)]


@pytest.mark.parametrize(("op_s", "is_taken"), [(2.2, True), (2.21, False)])
def test_what_the_optimum_uses_has_to_be_fast_enough(op_s: float, is_taken: bool) -> None:
    """2 s are wanted, and a tenth more will do; the fast device is worth twice as much."""
    assert OPTIMUM_LATE == 1.1
    optimum = ((Column(op_s, (0.0, 1.0)), 1.0),)
    dispatcher = dispatcher_of(((0, 1), op_s), ((1, 0), 2.0), optimum=optimum)
    ((job, *_),), _ = dispatcher.run(replace(guide(follows_optimum=True), prices=(2.0, 1.0)))
    assert job == (0, int(not is_taken), 1)


def test_what_the_optimum_uses_waits_for_room() -> None:
    """Both MetaOps run on the fast device there; the second one finds it taken, and waits."""
    one = {"batch_size": 1}
    metaops = (
        metaop_on_types("t/a", 2, {"fast": 1.0, "slow": 20.0}, **one),
        metaop_on_types("t/b", 1, {"fast": 1.0, "slow": 20.0}, **one),
    )
    problem = make_problem(profile_on_types(*metaops), cluster_of_types({"fast": 1, "slow": 1}))
    bound = lower_bound(problem)
    assert [len(used) for used in MixedDispatcher(problem, bound).optimum] == [1, 1]
    ones = (1.0, 1.0)
    timed, end_s = MixedDispatcher(problem, bound).run(
        MixedGuide(0.0, 2.0, ones, ones, ones, follows_optimum=True)
    )
    assert [(node, start_s) for (node, _, _), start_s, _ in timed] == [(1, 0.0), (0, 1.0)]
    assert end_s == pytest.approx(3.0)


def test_the_optimum_is_through_with_an_allocation_where_less_than_half_an_op_is_left() -> None:
    """Of 4 ops 1.4 on the fast device and 1.3 on the slow one, which is worth less: after one there the fast
    one is left to 0.4 of an op.
    """
    assert FEWEST_LEFT == 0.5
    optimum = ((Column(2.0, (1.0, 0.0)), 1.4), (Column(2.0, (0.0, 1.0)), 1.3))
    dispatcher = dispatcher_of(((1, 0), 2.0), ((0, 1), 2.0), num_ops=4, optimum=optimum)
    cheap = replace(guide(follows_optimum=True), prices=(2.0, 1.0), shares={(0, 0): 0.25})
    assert [job for job, _, _ in dispatcher.run(cheap)[0]] == [(0, 0, 1), (0, 1, 2), (0, 1, 1)]


def test_an_allocation_of_the_optimum_is_the_nearest_that_is_fast_enough() -> None:
    """By what the devices differ: a fast one is worth three slow ones."""
    points = [
        SimpleNamespace(counts=counts, op_s=op_s)
        for counts, op_s in (((0, 4), 3.0), ((2, 2), 2.0), ((1, 4), 2.0), ((2, 4), 1.0))
    ]

    def nearest(op_s: float, *counts: float) -> dict[int, float]:
        used = ((Column(op_s, counts), 2.0), (Column(op_s, (2.0, 4.0)), FEWEST_OPS - 0.01))
        return optimum_ops(points, used, (3.0, 1.0))  # type: ignore[arg-type]  # stand-ins

    assert nearest(2.0, 1.0, 3.0) == {2: 2.0}  # one slow device more, not a fast one more and a slow one less
    assert nearest(2.0, 2.0, 3.0) == {1: 2.0}  # of equals the first
    assert nearest(2.0, 0.0, 4.0) == {2: 2.0}  # the same devices, but half as long again
    assert nearest(2.95, 0.0, 4.0) == {0: 2.0}
    assert nearest(2.0, 1.0, 2.0) == {2: 2.0}  # two slow devices more, not a fast one
    both = ((Column(2.0, (2.0, 2.0)), 0.3), (Column(2.0, (2.0, 2.4)), 1.0))
    assert optimum_ops(points, both, (3.0, 1.0)) == {1: pytest.approx(1.3)}  # type: ignore[arg-type]


def test_the_optimum_runs_every_op() -> None:
    first = metaop_on_types("t/first", 3, {"fast": 1.0, "slow": 2.0}, batch_size=6)
    second = metaop_on_types("t/second", 5, {"fast": 1.0, "slow": 3.0}, batch_size=6, inputs=("t/first",))
    cluster = cluster_of_types({"fast": 3, "slow": 2})
    problem = make_problem(profile_on_types(first, second), cluster)
    bound = lower_bound(problem)
    for node, used, op_s in zip(problem.nodes, bound.ops, bound.op_s, strict=True):
        assert sum(ops for _, ops in used) == pytest.approx(node.num_ops)
        assert sum(column.op_s * ops for column, ops in used) == pytest.approx(node.num_ops * op_s)


def test_backwards_the_last_start_first_and_times_count_from_the_end() -> None:
    """a, then b and c side by side: forwards a is at the start, backwards the ragged end is."""
    one = {"batch_size": 1}
    metaops = (
        metaop_on_types("t/a", 1, {"fast": 1.0}, **one),
        metaop_on_types("t/b", 1, {"fast": 4.0}, inputs=("t/a",), **one),
        metaop_on_types("t/c", 1, {"fast": 1.0}, inputs=("t/a",), **one),
    )
    problem = make_problem(profile_on_types(*metaops), cluster_of_types({"fast": 2, "slow": 1}))
    bound = lower_bound(problem)
    same = MixedGuide(0.0, 2.0, (1.0,) * 3, (1.0,) * 3, (1.0, 1.0))
    timed, end_s = MixedDispatcher(problem, bound, backwards=True).run(same)
    assert end_s == pytest.approx(5.0)
    assert sorted((node, start_s, end_s) for (node, _, _), start_s, end_s in timed) == [
        (0, pytest.approx(4.0), pytest.approx(5.0)),
        (1, 0.0, pytest.approx(4.0)),
        (2, 0.0, pytest.approx(1.0)),
    ]
    assert MixedDispatcher(problem, bound, backwards=True).last_first == problem.order
    found = search(problem, bound, 0, 0, mixes=True)
    starts = {tuple(round(start_s) for _, start_s, _ in sorted(each)) for each in found}
    assert starts == {(0, 1, 1), (0, 1, 4)}  # c as soon, and as late, as it can be
    plain = search(problem, bound, 0, 0, mixes=False)  # forwards alone
    assert {tuple(round(start_s) for _, start_s, _ in sorted(each)) for each in plain} == {(0, 1, 1)}
    for each in found:
        assert [start_s for _, start_s, _ in each] == sorted(start_s for _, start_s, _ in each)


def test_the_best_schedules_are_returned_the_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of_types({"fast": 5, "slow": 6})
    first = [
        metaop_on_types(f"t/{number}", 5 + number, {"fast": 1.0, "slow": 1.5 + number}, batch_size=5 + number)
        for number in range(3)
    ]
    last = metaop_on_types("t/last", 7, {"fast": 1.0, "slow": 1.2}, batch_size=7, inputs=("t/0", "t/2"))
    problem = make_problem(profile_on_types(*first, last), cluster)
    bound = lower_bound(problem)

    def ends() -> list[float]:
        return [max(end_s for _, _, end_s in each) for each in search(problem, bound, 100, 0, mixes=True)]

    found = ends()
    monkeypatch.setattr(search_module, "MOST_RETURNED", 100)
    every = ends()
    assert len(every) > len(found) == 4
    assert found == every[:4] == sorted(every)[:4]
    assert every[0] < every[-1]


def test_only_a_search_tries_every_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(
        profile_on_types(metaop_on_types("t/net", 2, {"fast": 1.0}, batch_size=2)),
        cluster_of_types({"fast": 2, "slow": 1}),
    )
    bound = lower_bound(problem)
    monkeypatch.setattr(search_module, "QUICK_PATIENCE", ())
    assert search(problem, bound, 0, 0, mixes=True) == []
    assert search(problem, bound, 100, 0, mixes=True)
    assert search(problem, bound, 0, 0, mixes=False)


@pytest.mark.usefixtures("whole_searches")
def test_what_gives_up_memory_is_searched_half_as_long_for_mixes_and_from_effort_1_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    efforts: list[tuple[bool, int]] = []

    def searched(problem: object, bound: object, effort: int, seed: int, *, mixes: bool) -> list[object]:
        efforts.append((mixes, effort))
        return []

    monkeypatch.setattr(on_types, "search", searched)
    profile = profile_on_types(metaop_on_types("t/net", 2, {"fast": 1.0}, batch_size=2))
    for fallback in (MemoryFallback(), MemoryFallback(recompute={"t/net": 1})):
        posed = ProblemPoser().posed(profile, cluster_of_types({"fast": 2, "slow": 1}), fallback)
        for effort in (NO_SEARCH, 0, 2):
            posed.best("spindle", effort)
    assert [effort for mixes, effort in efforts if not mixes] == [0, 6_000, 6_000, 24_000, 96_000] * 2
    plain, given_up = [0, 6_000, 6_000, 24_000, 96_000], [12_000, 48_000]
    assert [effort for mixes, effort in efforts if mixes] == plain + given_up


def test_only_mixing_schedules_follow_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    metaops = [metaop_on_types(f"t/{n}", 4, {"fast": 1.0, "slow": 1.5 + n}, batch_size=6) for n in range(2)]
    problem = make_problem(profile_on_types(*metaops), cluster_of_types({"fast": 2, "slow": 3}))
    bound = lower_bound(problem)
    tried: list[MixedGuide] = []
    run = MixedDispatcher.run

    def noted(self: MixedDispatcher, guide: MixedGuide, *more: float) -> object:
        tried.append(guide)
        return run(self, guide, *more)

    monkeypatch.setattr(MixedDispatcher, "run", noted)
    monkeypatch.setattr(search_module, "CLOSE_ENOUGH", -1.0)  # searched to the end
    assert search(problem, bound, 40_000, 0, mixes=False)
    assert len(tried) > 1_000
    assert not any(guide.mixes or guide.follows_optimum for guide in tried)
    tried.clear()
    assert search(problem, bound, 0, 0, mixes=True)
    assert {(guide.mixes, guide.follows_optimum) for guide in tried} == {(True, False), (True, True)}


Placements = list[EvaluatedCandidate | None]
ONE_DEVICE = metaop_on_types("t/net", 2, {"fast": 1.0}, batch_size=2)


def searched_by_hand(problem: Problem, *_: object, mixes: bool) -> list[tuple[Timed, ...]]:
    """Plain on one device, mixing on both; the latter again, on one device and later than the plain one."""
    wide, narrow = (
        next(number for number, point in enumerate(problem.nodes[0].points) if point.num_devices == count)
        for count in (2, 1)
    )
    one_s, both_s = (2 * problem.nodes[0].points[number].op_s for number in (narrow, wide))
    plain = [(((0, narrow, 2), 0.0, one_s),)]
    return [(((0, wide, 2), 0.0, both_s),), (((0, narrow, 2), one_s, 2 * one_s),)] if mixes else plain


def by_hand(
    monkeypatch: pytest.MonkeyPatch,
    placed: Callable[[Sequence[Candidate], Placements], Placements],
) -> tuple[EvaluatedCandidate, bool]:
    """The best of these schedules, no baseline's among them, and whether memory stood in the way of none.

    Args:
        placed: makes of candidates and their placements those to go on with.
    """

    known_s: list[float] = []

    def best_placed(
        problem: Problem,
        candidates: Sequence[Candidate],
        *,
        with_care: bool,
        within_s: float,
        care_brings: float,
    ) -> Placements:
        assert care_brings > 0.01
        known_s.append(within_s)
        found = placed(candidates, best_of(problem, candidates, with_care=with_care, within_s=within_s))
        # What is known from then on: the best iteration so far.
        expected_s.append(min([expected_s[-1], *(each.prediction.iteration_s for each in found if each)]))
        return found

    expected_s = [inf]

    monkeypatch.setattr(on_types, "search", searched_by_hand)
    monkeypatch.setattr(on_types, "best_of", best_placed)
    monkeypatch.setattr(on_types.CandidatesOnTypes, "_baseline_candidates", lambda _: [])
    posed = ProblemPoser().posed(profile_on_types(ONE_DEVICE), cluster_of_types({"fast": 2, "slow": 1}))
    best, all_fit = posed.best("spindle", 0)
    assert best is not None
    assert known_s == expected_s[:-1]
    return best, all_fit


def test_the_best_of_all_schedules_is_taken_and_what_ends_too_late_is_not_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mixing ones first, the wide one among them, then plain ones."""
    numbers: list[int] = []

    def noted(candidates: Sequence[Candidate], found: Placements) -> Placements:
        numbers.append(len(candidates))
        return found

    best, all_fit = by_hand(monkeypatch, noted)
    assert best.slices[0].devices == (0, 1)
    assert all_fit
    assert numbers == [2, 0]


def test_memory_that_only_mixing_schedules_lack_is_not_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_of_mixing(_: Sequence[Candidate], found: Placements) -> Placements:
        return [each if each is not None and len(each.slices[0].devices) == 1 else None for each in found]

    best, all_fit = by_hand(monkeypatch, none_of_mixing)
    assert len(best.slices[0].devices) == 1
    assert all_fit
