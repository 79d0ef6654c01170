"""Schedules made shorter by patterns: that they are schedules, how they are ordered, and what is found."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from by_points import Has, end_of, problem_of, random_jobs, random_problem, what_is_wrong
from hypothesis import given
from hypothesis import strategies as st
from random_mixed_profiles import random_mixed_profile
from random_profiles import SHAPES, Shape

from helpers.examples import examples
from helpers.several_types import cluster_of_types
from spindle_cli.plan.bound.patterns import Pattern
from spindle_cli.plan.mixed.bound import mixed_bound
from spindle_cli.plan.mixed.dispatching.search import search
from spindle_cli.plan.mixed.problem import make_mixed_problem
from spindle_cli.plan.patterns import shorten as shorten_module
from spindle_cli.plan.patterns.backfill import Backfill
from spindle_cli.plan.patterns.beyond_compute import BeyondCompute
from spindle_cli.plan.patterns.climb import JOB_SHARE, Climber, Schedule
from spindle_cli.plan.patterns.program import PatternProgram
from spindle_cli.plan.patterns.shorten import (
    LONG,
    MOST_COMPARED,
    NUM_TURNS,
    SHORT,
    SUM_WEIGHTS,
    Shortener,
    jobs_of,
)
from spindle_cli.plan.patterns.side_by_side import sets_in_order
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.listing import Job, Timed

GB = 10**9


def prices(problem: Problem) -> list[float]:
    """All devices worth the same."""
    kinds = problem.devices_of_types
    return [1 / sum(kinds)] * len(kinds)


def timed(problem: Problem, jobs: Sequence[Job]) -> list[Timed]:
    return Backfill(problem).timed(jobs)[0]


def iteration_s(problem: Problem, schedule: Sequence[Timed]) -> float:
    return end_of(schedule) + BeyondCompute(problem).added_s(schedule)


def require_sound(
    problem: Problem, known: Sequence[Sequence[Timed]], found: Sequence[Sequence[Timed]]
) -> None:
    """All valid, each once, the shortest first."""
    assert found
    for schedule in found:
        assert what_is_wrong(problem, schedule) == []
    assert len({frozenset(schedule) for schedule in found}) == len(found)
    lengths_s = [iteration_s(problem, schedule) for schedule in found]
    assert lengths_s == sorted(lengths_s)
    if len(known) == 1:
        fewer = max(0, len(known[0]) - len(found[0]))
        assert lengths_s[0] <= iteration_s(problem, known[0]) + fewer * JOB_SHARE * end_of(known[0]) + 1e-9


@given(seed=st.integers(0, 10**6), count=st.integers(1, 3))
@examples(200)
def test_what_is_shortened_is_valid_each_once_the_shortest_first(seed: int, count: int) -> None:
    random = Random(seed)
    problem = random_problem(random, most_types=3)
    known = [timed(problem, random_jobs(problem, random)) for _ in range(count)]
    found = Shortener(problem, prices(problem)).shortened(known, 1200, seed)
    require_sound(problem, known, found)
    assert Shortener(problem, prices(problem)).shortened(known, 1200, seed) == found


@pytest.mark.parametrize("shape", SHAPES)
def test_schedules_of_a_search_become_shorter(shape: Shape) -> None:
    cluster = cluster_of_types({"a800-80gb": 8, "h20-96gb": 8}, devices_per_node=4)
    problem = make_mixed_problem(random_mixed_profile(5, shape, cluster), cluster)
    bound = mixed_bound(problem)
    known = search(problem, bound, 0, 0, mixes=True)
    found = Shortener(problem, bound.prices).shortened(known, 4000, 0)
    require_sound(problem, known, found)
    best_s = min(iteration_s(problem, schedule) for schedule in known)
    assert iteration_s(problem, found[0]) < best_s
    assert all(end_of(schedule) >= bound.lower_bound_s for schedule in found)


def test_allocations_that_fit_side_by_side_are_found_without_any_change_at_random() -> None:
    """a and b on three and one of four devices leave none idle; both began on two of them, one by one."""
    problem = problem_of(
        {"fast": 4},
        a=Has(6, [((2,), 1.0), ((3,), 0.5), ((4,), 0.45)]),
        b=Has(3, [((1,), 1.0), ((2,), 0.9)]),
    )
    start = timed(problem, [(0, 0, 6), (1, 1, 3)])
    assert end_of(start) == 6.0
    best, *_ = Shortener(problem, prices(problem)).shortened([start], 0, 0)
    assert end_of(best) == 3.0
    assert sorted(job for job, *_ in best) == [(0, 1, 6), (1, 0, 3)]


def test_the_order_of_a_schedule_is_kept_without_any_change_at_random() -> None:
    """a and b would fit side by side, but for c behind b, which was before a. What waits for nothing could
    run at any time: what comes out is shorter by that.
    """
    ones = [((1,), 1.0)]
    problem = problem_of({"fast": 2}, a=Has(4, ones), b=Has(4, ones), c=Has(4, ones, ("b",)))
    start = timed(problem, [(1, 0, 4), (2, 0, 4), (0, 0, 4)])
    assert end_of(start) == 8.0
    late: list[Timed] = [((1, 0, 4), 0.0, 4.0), ((2, 0, 4), 4.0, 8.0), ((0, 0, 4), 8.0, 12.0)]
    best, *_ = Shortener(problem, prices(problem)).shortened([late], 0, 0)
    assert end_of(best) == 8.0


def test_what_takes_less_with_its_sums_is_shorter() -> None:
    """Alone 4 s; on both types 2 s, and of 30 GB a sum of 3 s."""
    points = [((1, 0), 4.0), ((1, 1), 2.0)]
    for param_bytes, expected in ((30 * GB, 0), (10 * GB, 1)):
        has = Has(1, points, (), {"param_bytes_per_op": param_bytes})
        problem = problem_of({"fast": 1, "slow": 1}, a=has)
        found = Shortener(problem, prices(problem)).shortened(
            [timed(problem, [(0, point, 1)]) for point in (1, 0)], 600, 0
        )
        assert [job[1] for job, *_ in found[0]] == [expected]


class Tried:
    """What programs were asked for, and how much was changed at random."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.efforts: list[int] = []
        self.rounds: list[int] = []
        self.followed: list[Sequence[frozenset[int]]] = []
        self.starts: list[Schedule] = []
        self.climbed: list[Schedule] = []
        shortest, climbed = PatternProgram.shortest, Climber.climbed

        def noted_shortest(program: PatternProgram, sets: Sequence[frozenset[int]], *rounds: int) -> object:
            self.rounds += rounds or (0,)
            self.followed += () if rounds else (sets,)
            return shortest(program, sets, *rounds)

        def noted_climbed(climber: Climber, start: Schedule, effort: int, random: Random) -> Schedule:
            self.efforts.append(effort)
            self.starts.append(start)
            self.climbed.append(climbed(climber, start, effort, random))
            return self.climbed[-1]

        monkeypatch.setattr(PatternProgram, "shortest", noted_shortest)
        monkeypatch.setattr(Climber, "climbed", noted_climbed)

    def shortest(self, count: int) -> list[Schedule]:
        """Of the first that were changed at random, as they came out."""
        return sorted(self.climbed[:count], key=lambda schedule: schedule.iteration_s)


def test_the_effort_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two orders by two programs, the best by both once more, and the two best for longer."""
    tried = Tried(monkeypatch)
    random = Random(7)
    problem = random_problem(random)
    known = [timed(problem, random_jobs(problem, random)) for _ in range(8)]
    orders = {tuple(sets_in_order(problem, schedule)) for schedule in known}
    assert len(orders) > MOST_COMPARED
    Shortener(problem, prices(problem)).shortened(known, 1200, 0)
    assert tried.efforts == [1200 // SHORT] * 6 + [1200 // LONG] * 2
    assert sum(tried.efforts) <= 1200
    assert [rounds for rounds in tried.rounds if rounds == 2] == [2] * len(SUM_WEIGHTS) * MOST_COMPARED
    assert tried.rounds.count(0) == 6


def test_the_best_are_followed_again_and_changed_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    orders_differ = False
    for seed in (7, 11, 13, 14, 18):
        tried = Tried(monkeypatch)
        random = Random(seed)
        problem = random_problem(random)
        known = [timed(problem, random_jobs(problem, random)) for _ in range(8)]
        Shortener(problem, prices(problem)).shortened(known, 600, seed)
        best, *_, worst = (sets_in_order(problem, schedule.timed) for schedule in tried.shortest(4))
        assert tried.followed[4:] == [best, best]
        orders_differ = orders_differ or best != worst
        assert tried.starts[6:] == tried.shortest(6)[:2]
        monkeypatch.undo()
    assert orders_differ


def test_equal_orders_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried(monkeypatch)
    problem = problem_of({"fast": 2}, a=Has(2, [((1,), 1.0), ((2,), 0.75)]))
    known = [timed(problem, [(0, 0, 2)]), timed(problem, [(0, 1, 2)])]
    found = Shortener(problem, prices(problem)).shortened(known, 0, 0)
    assert len(tried.efforts) == 2 + 2 + 2
    assert found == [timed(problem, [(0, 1, 2)])]


def test_the_orders_of_the_shortest_sequences_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chains of three take 3 s side by side, in a schedule that is late. In one where the second starts
    behind the first, only its start and the end of the other may be side by side: 4 s.
    """
    monkeypatch.setattr(shorten_module, "MOST_ORDERS", 1)
    tried = Tried(monkeypatch)
    one = [((1,), 1.0)]
    waits_for = {"a": "", "b": "a", "c": "b", "d": "", "e": "d", "f": "e"}
    problem = problem_of({"fast": 2}, **{name: Has(1, one, tuple(own)) for name, own in waits_for.items()})
    late, behind = ((4.0, 5.0, 6.0, 4.0, 5.0, 6.0), (0.0, 1.0, 2.0, 3.0, 4.0, 5.0))
    known: list[list[Timed]] = [
        [((node, 0, 1), start_s, start_s + 1) for node, start_s in enumerate(starts)]
        for starts in (behind, late)
    ]
    best, *_ = Shortener(problem, prices(problem)).shortened(known, 0, 0)
    assert end_of(best) == 3.0
    assert {tuple(sets) for sets in tried.followed} == {tuple(map(frozenset, ((0, 3), (1, 4), (2, 5))))}


def test_what_is_good_stays_as_good() -> None:
    """What patterns become when their ops are rounded is often longer; the schedule itself is kept then."""
    for seed in range(25):
        random = Random(seed)
        problem = random_problem(random)
        shortener = Shortener(problem, prices(problem))
        good, *_ = shortener.shortened([timed(problem, random_jobs(problem, random))], 4000, seed)
        late: list[Timed] = [(job, start_s + 1, stop_s + 1) for job, start_s, stop_s in good]
        for known in ([good], [late, good]):  # of schedules in the same order the shortest counts
            again, *_ = shortener.shortened(known, 0, seed)
            assert iteration_s(problem, again) <= iteration_s(problem, good)


def test_what_is_justified_is_taken_where_it_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is later, by less than the patterns save."""
    late_s = 1.5
    justified = Backfill.justified

    def late(self: Backfill, known: Sequence[Timed]) -> tuple[list[Timed], float]:
        found, end_s = justified(self, known)
        return [(job, start_s + late_s, stop_s + late_s) for job, start_s, stop_s in found], end_s + late_s

    monkeypatch.setattr(Backfill, "justified", late)
    test_allocations_that_fit_side_by_side_are_found_without_any_change_at_random()


def test_patterns_are_of_times_with_and_without_sums_and_go_on_over_gaps_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights: list[float] = []
    over: list[bool] = []
    counted = BeyondCompute.counted

    def noted(self: BeyondCompute, weight: float) -> Problem:
        weights.append(weight)
        return counted(self, weight)

    def noted_jobs(of: Problem, patterns: Sequence[tuple[Pattern, float]], *, over_gaps: bool) -> list[Job]:
        over.append(over_gaps)
        return jobs_of(of, patterns, over_gaps=over_gaps)

    monkeypatch.setattr(BeyondCompute, "counted", noted)
    monkeypatch.setattr(shorten_module, "jobs_of", noted_jobs)
    problem = problem_of({"fast": 2}, a=Has(2, [((1,), 1.0)]), b=Has(2, [((1,), 1.0)]))
    Shortener(problem, prices(problem)).shortened([timed(problem, [(0, 0, 2), (1, 0, 2)])], 0, 0)
    assert sorted(weights) == [0.0, 0.2]
    assert over.count(True) + over.count(False) == 4 * NUM_TURNS
    assert over.count(True) > NUM_TURNS
    assert over.count(False) > NUM_TURNS


def test_another_seed_shortens_otherwise() -> None:
    random = Random(11)
    problem = random_problem(random)
    known = [timed(problem, random_jobs(problem, random))]
    shortener = Shortener(problem, prices(problem))
    found = [[frozenset(each) for each in shortener.shortened(known, 600, seed)] for seed in range(4)]
    assert any(each != found[0] for each in found)
