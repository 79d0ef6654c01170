"""How schedules made shorter by patterns join those of a search on several types."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.plan.mixed import posed as posed_module
from spindle_cli.plan.mixed.posed import SHORTENING, PosedOnTypes, SeveralTypes
from spindle_cli.plan.patterns.shorten import Shortener
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.problem import MemoryFallback, Problem
from spindle_cli.plan.schedule import Draft, UnplacedSlice
from spindle_cli.plan.search.judge import Judged, best_of
from spindle_cli.plan.search.listing import Timed
from spindle_cli.plan.strategies.spindle import NO_SEARCH

# One MetaOp of eight ops, on one or both of two devices.
NARROW, WIDE = range(2)


def of_points(problem: Problem, *points: int) -> tuple[Timed, ...]:
    """A schedule of eight ops on these allocations in turn, each with as many ops, or those of the last."""
    timed: list[Timed] = []
    now_s = 0.0
    for place, point in enumerate(points):
        ops = 1 if place < len(points) - 1 else 9 - len(points)
        end_s = now_s + ops * problem.nodes[0].points[point].op_s
        timed.append(((0, point, ops), now_s, end_s))
        now_s = end_s
    return tuple(timed)


class ByHand:
    """What is searched and made shorter, by hand; what of it was asked for."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        shorter: Sequence[Sequence[int]] = (),
        plain: Sequence[int] = (NARROW,),
        mixing: Sequence[int] = (NARROW, WIDE),
        fallback: MemoryFallback | None = None,
    ) -> None:
        self.asked: list[tuple[list[tuple[Timed, ...]], int, int]] = []
        self.searched: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        self.placed: list[tuple[list[int], bool, float]] = []
        self.lost: set[int] = set()  # numbers of slices whose placements do not fit
        metaop = metaop_on_types("t/net", 8, {"fast": 1.0}, batch_size=2)
        self.posed: PosedOnTypes = SeveralTypes().posed(
            profile_on_types(metaop), cluster_of_types({"fast": 2}), fallback
        )

        def searched(
            problem: Problem, _: object, effort: int, seed: int, *, mixes: bool
        ) -> list[tuple[Timed, ...]]:
            self.searched[mixes].append((effort, seed))
            points = mixing if mixes else plain
            return [of_points(problem, *points)] if points else []

        def shortened(
            _: Shortener, schedules: Sequence[tuple[Timed, ...]], effort: int, seed: int
        ) -> list[tuple[Timed, ...]]:
            self.asked.append((list(schedules), effort, seed))
            return [of_points(self.posed.problem, *points) for points in shorter]

        def placed(
            problem: Problem,
            drafts: Sequence[Draft],
            *,
            with_care: bool,
            within_s: float,
            care_brings: float,
        ) -> list[Judged | None]:
            self.placed.append(([len(draft.pieces) for draft in drafts], with_care, care_brings))
            found = best_of(problem, drafts, with_care=with_care, within_s=within_s)
            lost = self.lost if problem is self.posed.problem else set()  # not with ample memory
            return [None if each and len(each.slices) in lost else each for each in found]

        monkeypatch.setattr(posed_module, "search", searched)
        monkeypatch.setattr(posed_module, "best_of", placed)
        monkeypatch.setattr(PosedOnTypes, "_baseline_drafts", lambda _: [])
        monkeypatch.setattr(Shortener, "shortened", shortened)

    def best(self, effort: int = 0) -> tuple[Judged, bool]:
        best, all_fit = self.posed.best("spindle", effort)
        assert best is not None
        return best, all_fit


@pytest.mark.parametrize(("effort", "searches"), [(0, [1]), (1, [1, 4]), (2, [1, 4, 16])])
def test_all_schedules_of_all_searches_are_made_shorter_by_the_effort_and_seed_of_the_last(
    monkeypatch: pytest.MonkeyPatch, effort: int, searches: list[int]
) -> None:
    by_hand = ByHand(monkeypatch)
    by_hand.best(effort)
    problem, base = by_hand.posed.problem, posed_module.BASE_JOBS
    every = [
        *[of_points(problem, NARROW)] * (effort + 1),
        *[of_points(problem, NARROW, WIDE)] * (effort + 1),
    ]
    assert by_hand.asked == [(every, SHORTENING * searches[-1] * base, effort)]
    of_each = [(times * base, seed) for seed, times in enumerate(searches)]
    assert by_hand.searched == {False: of_each, True: of_each}


@pytest.mark.parametrize(("types", "times"), [("ab", 1), ("abc", 2), ("abcd", 3)])
def test_each_type_beyond_the_first_has_as_many_jobs_searched(
    monkeypatch: pytest.MonkeyPatch, types: str, times: int
) -> None:
    searched: list[int] = []

    def search(_: Problem, __: object, jobs: int, *___: int, mixes: bool) -> list[tuple[Timed, ...]]:
        searched.append(jobs * (1 if mixes else -1))
        return []

    monkeypatch.setattr(posed_module, "search", search)
    metaop = metaop_on_types("t/net", 2, dict.fromkeys(types, 1.0))
    cluster = cluster_of_types(dict.fromkeys(types, 1))
    SeveralTypes().posed(profile_on_types(metaop), cluster).best("spindle", 0)
    jobs = times * posed_module.BASE_JOBS
    assert searched == [-jobs, jobs]


@pytest.mark.parametrize("mixed", [False, True])
def test_of_all_searches_the_shortest_schedules_are_placed_each_once(
    monkeypatch: pytest.MonkeyPatch, *, mixed: bool
) -> None:
    """By the number of their slices: the more of them, the longer."""
    monkeypatch.setattr(posed_module, "MOST_SEARCHED", 4)
    by_hand = ByHand(monkeypatch)
    found = [(NARROW, WIDE) * half for half in (4, 2, 1, 3)] + [(WIDE,)]

    def searched(problem: Problem, *_: object, mixes: bool) -> list[tuple[Timed, ...]]:
        return [of_points(problem, *points) for points in found] if mixes is mixed else []

    monkeypatch.setattr(posed_module, "search", searched)
    by_hand.best(1)
    (placed,) = (numbers for numbers, *_ in by_hand.placed if numbers)
    assert placed == [1, 2, 4, 6]


def test_what_gives_up_memory_is_made_shorter_half_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    efforts = []
    for fallback in (MemoryFallback(), MemoryFallback(recompute={"t/net": 1})):
        by_hand = ByHand(monkeypatch, fallback=fallback)
        by_hand.best(1)
        efforts += [effort for _, effort, _ in by_hand.asked]
    whole = SHORTENING * 4 * posed_module.BASE_JOBS
    assert efforts == [whole, whole // 2]


def test_a_quick_plan_makes_nothing_shorter_and_is_placed_without_care(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for effort, has_care in ((NO_SEARCH, False), (0, True)):
        by_hand = ByHand(monkeypatch)
        by_hand.best(effort)
        assert bool(by_hand.asked) is has_care
        assert {with_care for _, with_care, _ in by_hand.placed} == {has_care}
        assert {care_brings for *_, care_brings in by_hand.placed} == {posed_module.CARE_BRINGS_ON_TYPES}


def test_where_a_search_finds_one_kind_that_alone_is_made_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    for plain, mixing in (((NARROW,), ()), ((), (NARROW, WIDE))):
        by_hand = ByHand(monkeypatch, plain=plain, mixing=mixing)
        by_hand.best()
        assert [known for known, *_ in by_hand.asked] == [[of_points(by_hand.posed.problem, *plain, *mixing)]]


def test_the_first_of_what_is_shorter_are_placed_before_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of their slices: of seven the first five, which are faster than all others."""
    monkeypatch.setattr(posed_module, "MOST_SHORTENED", 5)
    narrow = [(NARROW, WIDE) * half for half in (1, 2, 3)]
    shorter = [*((*first, NARROW) for first in narrow), *narrow, (WIDE,)]
    by_hand = ByHand(monkeypatch, shorter, mixing=(NARROW, WIDE, NARROW, NARROW))
    by_hand.best()
    first, mixing, plain = (numbers for numbers, *_ in by_hand.placed)
    assert sorted(first) == sorted(len(points) for points in shorter[:5])
    assert mixing == []
    assert plain == []


def test_what_is_shorter_may_be_the_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    best, all_fit = ByHand(monkeypatch, [(WIDE,)]).best()
    assert [piece.devices for piece in best.slices] == [(0, 1)]
    assert all_fit


@pytest.mark.parametrize(("slices", "fits"), [(1, True), (2, True), (3, False)])
def test_memory_that_only_what_is_shorter_or_mixed_lacks_is_not_short(
    monkeypatch: pytest.MonkeyPatch, slices: int, *, fits: bool
) -> None:
    """Of one slice the schedule that is shorter, of two that which mixes, of three the plain one, which is
    the fastest of all here.
    """
    by_hand = ByHand(monkeypatch, [(NARROW,)], mixing=(WIDE, NARROW), plain=(WIDE, NARROW, WIDE))
    by_hand.lost.add(slices)
    best, all_fit = by_hand.best()
    assert all_fit is fits
    assert len(best.slices) == (3 if fits else 2)


@pytest.mark.parametrize(("with_ample_s", "fits"), [(0.9895, False), (0.9905, True), (1.1, True)])
def test_memory_is_short_only_where_more_of_it_would_be_worth_giving_something_up(
    monkeypatch: pytest.MonkeyPatch, with_ample_s: float, *, fits: bool
) -> None:
    """Of two plain schedules one does not fit; with ample memory an iteration would be faster by a hundredth
    or not.
    """
    by_hand = ByHand(monkeypatch, plain=(NARROW,), mixing=())
    asked: list[tuple[bool, int]] = []

    def placed(problem: Problem, drafts: Sequence[Draft], **__: object) -> list[Judged | None]:
        asked.append((problem is by_hand.posed.problem, len(drafts)))
        is_ample = min(problem.cluster.memory_bytes) > max(by_hand.posed.problem.cluster.memory_bytes)
        assert is_ample is not asked[-1][0]
        best_s = 1.0 if asked[-1][0] else with_ample_s
        found = Judged("spindle", (), (), Prediction(best_s, 0.0, 0.0, 0.0, 0.0, 0.0))
        return [found, None] if asked[-1][0] and drafts else [found] * len(drafts)

    monkeypatch.setattr(posed_module, "best_of", placed)
    monkeypatch.setattr(posed_module, "may_gain", lambda *_: False)
    _, all_fit = by_hand.best()
    assert all_fit is fits
    assert asked[-2:] == [(True, 1), (False, 1)]
    assert by_hand.posed.best("spindle", NO_SEARCH)[1] is False, "what is not searched is not looked at twice"
    assert asked[-1] == (True, 1)


def with_baselines(
    monkeypatch: pytest.MonkeyPatch, iteration_s: float | None, *baselines: tuple[float, float | None]
) -> tuple[float | None, bool, list[float]]:
    """The iteration of the best plan, whether memory stood in the way of none, and which were looked at.

    Args:
        iteration_s: of the only schedule of a search; None: there is none.
        baselines: the end of each one's schedule, and its iteration; None: it does not fit.
    """
    by_hand = ByHand(monkeypatch, plain=() if iteration_s is None else (NARROW,), mixing=())
    point = by_hand.posed.problem.nodes[0].points[0]
    drafts = [
        Draft(
            str(end_s), tuple(UnplacedSlice(0, op, op + 4, point, 0.0, part * end_s) for op, part in of_two)
        )
        for end_s, _ in baselines
        for of_two in [((0, 0.5), (4, 1.0))]
    ]
    looked_at: list[float] = []

    def judged(seconds: float | None) -> Judged | None:
        return seconds and Judged("spindle", (), (), Prediction(seconds, 0.0, 0.0, 0.0, 0.0, 0.0))

    def noted(problem: Problem, draft: Draft) -> Judged | None:
        if problem is not by_hand.posed.problem:  # with ample memory
            return judged(float(draft.name))
        looked_at.append(float(draft.name))
        return judged(dict(baselines)[looked_at[-1]])

    def placed(_: Problem, drafts: Sequence[Draft], **__: object) -> list[Judged | None]:
        return [judged(iteration_s) for _ in drafts]

    monkeypatch.setattr(posed_module, "judge", noted)
    monkeypatch.setattr(posed_module, "best_of", placed)
    monkeypatch.setattr(posed_module, "pipelines", lambda *_: [])
    monkeypatch.setattr(posed_module, "may_gain", lambda *_: False)
    monkeypatch.setattr(PosedOnTypes, "_baseline_drafts", lambda _: drafts)
    best, all_fit = by_hand.posed.best("spindle", 0)
    return best and best.prediction.iteration_s, all_fit, looked_at


def test_baselines_are_looked_at_as_long_as_they_could_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one first whose schedule ends first; none that ends when the best iteration does, or later."""
    found = with_baselines(monkeypatch, 16.0, (14.0, 18.0), (16.0, 16.0), (12.0, 15.0), (17.0, 17.0))
    assert found == (15.0, True, [12.0, 14.0])
    assert with_baselines(monkeypatch, 16.0, (16.0, 16.0)) == (16.0, True, [])
    assert with_baselines(monkeypatch, None, (16.0, 17.0), (18.0, 18.0)) == (17.0, True, [16.0])
    # One that is through with its schedule is not slower for that.
    assert with_baselines(monkeypatch, None, (16.0, 16.0), (15.0, 19.0)) == (16.0, True, [15.0, 16.0])


def test_a_baseline_is_looked_at_on_its_devices_and_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """None fits, so that all are. By peaks of these types, which are not known, there is none."""
    looked_at: list[tuple[str, bool]] = []

    def noted(_: Problem, draft: Draft) -> None:
        looked_at.append((draft.name, draft.devices is None))

    monkeypatch.setattr(posed_module, "search", lambda *_, **__: [])
    monkeypatch.setattr(posed_module, "judge", noted)
    monkeypatch.setattr(posed_module, "pipelines", lambda *_: [])
    metaop = metaop_on_types("t/net", 2, {"fast": 1.0, "slow": 2.0})
    posed = SeveralTypes().posed(profile_on_types(metaop), cluster_of_types({"fast": 1, "slow": 1}))
    assert posed.best("spindle", 0) == (None, False)
    each = [("dp-even", False), ("sequential", False), ("spindle", True), ("spindle", True)]
    assert sorted(looked_at) == sorted(each)


def test_memory_is_short_where_a_baseline_that_could_be_faster_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert with_baselines(monkeypatch, 16.0, (15.0, None)) == (16.0, False, [15.0])
    assert with_baselines(monkeypatch, 16.0, (17.0, None)) == (16.0, True, [])
    assert with_baselines(monkeypatch, None, (15.0, None), (17.0, 18.0)) == (18.0, False, [15.0, 17.0])
    assert with_baselines(monkeypatch, None, (15.0, None)) == (None, False, [15.0])
    # One that was looked at before another one was found to be faster than its schedule.
    assert with_baselines(monkeypatch, None, (14.0, None), (15.0, 15.0)) == (15.0, False, [14.0, 15.0])
