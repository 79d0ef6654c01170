"""Jobs started as early as devices and inputs allow: by hand, and against all possible starts."""

from __future__ import annotations

from copy import deepcopy
from random import Random

import pytest
from by_points import Has, chain_behind_two, end_of, problem_of, random_jobs, random_problem, what_is_wrong
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.plan.patterns import backfill as backfill_module
from spindle_cli.plan.patterns.backfill import (
    STRIDE,
    Backfill,
    first_started_first,
    last_ended_first,
)
from spindle_cli.plan.problem import Point, Problem, make_problem
from spindle_cli.plan.search.listing import Job, Timed

FOUR = {"fast": 4}
TWO_AND_TWO = {"fast": 2, "slow": 2}
SEEDS = st.integers(0, 10**6)


def spans(timed: list[Timed]) -> list[tuple[float, float]]:
    return [(start_s, end_s) for _, start_s, end_s in timed]


def whole(problem: Problem) -> list[Job]:
    """Each node in one job on its first allocation."""
    return [(node.index, 0, node.num_ops) for node in problem.nodes]


@pytest.mark.parametrize(("op_s", "start_s"), [(2.0, 0.0), (2.0625, 5.0)])
def test_a_job_goes_into_a_gap_that_is_long_enough(op_s: float, start_s: float) -> None:
    """a leaves two of four devices free for 2 s, until b takes three of them."""
    problem = problem_of(
        FOUR,
        a=Has(1, [((2,), 2.0)]),
        b=Has(3, [((3,), 1.0)]),
        c=Has(1, [((2,), op_s)]),
    )
    timed, end_s = Backfill(problem).timed(whole(problem))
    assert spans(timed) == [(0.0, 2.0), (2.0, 5.0), (start_s, start_s + op_s)]
    assert [job for job, _, _ in timed] == whole(problem)
    assert end_s == max(5.0, start_s + op_s)


@pytest.mark.parametrize(("op_s", "start_s"), [(0.5, 1.0), (1.0, 1.0), (1.5, 3.0)])
def test_a_gap_is_looked_for_from_the_end_of_what_is_in_the_way(op_s: float, start_s: float) -> None:
    """One of four devices is free until 1 s, three until 2 s, one until 3 s."""
    problem = problem_of(
        FOUR,
        a=Has(1, [((2,), 1.0)]),
        y=Has(1, [((1,), 2.0)]),
        x=Has(1, [((3,), 1.0)], ("y",)),
        z=Has(1, [((2,), op_s)]),
    )
    timed, _ = Backfill(problem).timed(whole(problem))
    assert spans(timed) == [(0.0, 1.0), (0.0, 2.0), (2.0, 3.0), (start_s, start_s + op_s)]


def test_a_job_waits_for_the_type_that_is_short() -> None:
    problem = problem_of(
        TWO_AND_TWO,
        fast=Has(2, [((2, 0), 2.0)]),
        slow=Has(1, [((0, 2), 2.0)]),
        both=Has(1, [((1, 1), 1.0)]),
        one=Has(1, [((0, 1), 1.0)]),
    )
    timed, end_s = Backfill(problem).timed(whole(problem))
    assert spans(timed) == [(0.0, 4.0), (0.0, 2.0), (4.0, 5.0), (2.0, 3.0)]
    assert end_s == 5.0


def test_a_job_waits_for_all_inputs_and_for_the_jobs_of_its_own_node() -> None:
    problem = problem_of(
        FOUR,
        a=Has(1, [((1,), 1.0)]),
        b=Has(2, [((1,), 1.0)]),
        c=Has(4, [((1,), 1.0), ((2,), 0.5)], ("b", "a")),
    )
    jobs = [(0, 0, 1), (1, 0, 2), (2, 0, 1), (2, 1, 3)]
    timed, _ = Backfill(problem).timed(jobs)
    assert spans(timed) == [(0.0, 1.0), (0.0, 2.0), (2.0, 3.0), (3.0, 4.5)]


def test_backwards_producers_wait_for_consumers() -> None:
    problem = problem_of(
        FOUR,
        a=Has(1, [((1,), 1.0)]),
        b=Has(2, [((1,), 1.0)], ("a",)),
        c=Has(3, [((1,), 1.0)], ("a",)),
    )
    timed, end_s = Backfill(problem).timed([(1, 0, 2), (2, 0, 3), (0, 0, 1)], backwards=True)
    assert spans(timed) == [(0.0, 2.0), (0.0, 3.0), (3.0, 4.0)]
    assert end_s == 4.0


def test_a_gap_may_be_too_short_by_what_floats_are_off() -> None:
    """Ten tenths end a little before 1 s: what takes 1 s has room beside them."""
    problem = problem_of(
        {"fast": 2},
        tenths=Has(1, [((1,), sum([0.1] * 10))]),
        both=Has(1, [((2,), 1.0)], ("tenths",)),
        one=Has(1, [((1,), 1.0)]),
        last=Has(1, [((2,), 1.0)]),
    )
    assert problem.nodes[0].points[0].op_s < 1.0
    timed, end_s = Backfill(problem).timed(whole(problem))
    assert spans(timed)[2] == (0.0, 1.0)
    assert [start_s for start_s, _ in spans(timed)] == pytest.approx([0.0, 1.0, 0.0, 2.0])
    assert end_s == pytest.approx(3.0)


def test_a_list_is_ordered_by_start_or_from_its_end() -> None:
    timed: list[Timed] = [((0, 0, 1), 1.0, 4.0), ((1, 0, 1), 0.0, 2.0), ((2, 0, 1), 2.0, 5.0)]
    assert [job[0] for job in first_started_first(timed)] == [1, 0, 2]
    assert [job[0] for job in last_ended_first(timed)] == [2, 0, 1]


def test_justification_makes_what_has_slack_wait() -> None:
    """z and w start on two devices before x and y, a chain of 1 and 3 s: 5 s; from the end y is first."""
    problem = chain_behind_two()
    backfill = Backfill(problem)
    timed, end_s = backfill.timed(whole(problem))
    assert (spans(timed), end_s) == ([(0.0, 1.0), (0.0, 3.0), (1.0, 2.0), (2.0, 5.0)], 5.0)
    again, again_s = backfill.justified(timed)
    assert again_s == 4.0
    assert {job[0]: start_s for job, start_s, _ in again} == {0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0}


def test_a_limit_is_one_that_a_schedule_may_reach() -> None:
    """A chain beside a job that all others wait for, or not."""
    problem = problem_of(
        FOUR,
        a=Has(1, [((4,), 1.0)]),
        b=Has(2, [((1,), 2.0), ((2,), 1.0)], ("a",)),
        c=Has(1, [((1,), 0.5)], ("b",)),
        d=Has(1, [((3,), 4.0)]),
    )
    backfill, jobs = Backfill(problem), [(0, 0, 1), (1, 0, 2), (2, 0, 1), (3, 0, 1)]
    trail = backfill.trail(jobs)
    timed, end_s = backfill.timed(jobs)
    assert end_s == 5.5
    for first in range(len(jobs) + 1):
        assert backfill.changed(trail, jobs, first, 5.5) == (timed, 5.5)
        assert backfill.changed(trail, jobs, first, 5.4375) is None


@pytest.mark.parametrize(("within_s", "is_left"), [(5.4375, True), (5.5, False)])
def test_what_cannot_end_in_time_is_left_at_the_first_job_that_shows_it(
    within_s: float, *, is_left: bool
) -> None:
    """Behind a, which ends at 3 s for others on its devices, a chain of 2.5 s is left, on its fastest
    allocations.
    """
    problem = problem_of(
        FOUR,
        a=Has(1, [((4,), 2.0)]),
        b=Has(2, [((1,), 2.0), ((2,), 1.0)], ("a",)),
        b2=Has(1, [((1,), 0.5)], ("a",)),
        c=Has(1, [((1,), 0.5)], ("b", "b2")),
        others=Has(1, [((1,), 1.0)]),
    )
    backfill = Backfill(problem)
    jobs = [(4, 0, 1), (0, 0, 1), (99, 0, 1)]  # there is no such node
    trail = backfill.trail(jobs[:2])
    if is_left:
        assert backfill.changed(trail, jobs, 0, within_s) is None
    else:
        with pytest.raises(IndexError):
            backfill.changed(trail, jobs, 0, within_s)


def test_on_one_type_devices_are_those_of_its_points() -> None:
    problem = make_problem(profile_of(metaop_of("t/a", 1, {1: 2.0, 2: 1.0})), cluster_of(3))
    assert problem.devices_of_types == (3,)
    assert [point.of_types for point in problem.nodes[0].points] == [(1,), (2,)]
    assert Backfill(problem).timed([(0, 1, 1)])[1] == 1.0
    split = Point(num_devices=4, dp=2, tp=2, forward_s=1.0, backward_s=1.0, op_s=2.0)
    assert split.of_types == (4,)


def test_types_have_room_for_as_many_devices_as_anyone_has() -> None:
    problem = problem_of(
        {"fast": 4000, "slow": 3000},
        a=Has(1, [((4000, 0), 1.0)]),
        b=Has(1, [((0, 3000), 1.0)]),
        c=Has(1, [((1, 0), 1.0)]),
    )
    assert spans(Backfill(problem).timed(whole(problem))[0]) == [(0.0, 1.0), (0.0, 1.0), (1.0, 2.0)]


def by_all_starts(problem: Problem, jobs: list[Job], *, backwards: bool = False) -> list[tuple[float, float]]:
    """The same by looking at every time at which anything ends, the earliest first."""
    found: list[Timed] = []
    for node, point, ops in jobs:
        own = problem.nodes[node]
        waits_for = {node, *(own.consumers if backwards else own.inputs)}
        ready_s = max((end_s for job, _, end_s in found if job[0] in waits_for), default=0.0)
        lasts_s, taken = ops * own.points[point].op_s, own.points[point].of_types

        def fits(start_s: float, lasts_s: float = lasts_s, taken: tuple[int, ...] = taken) -> bool:
            times = {start_s, *(time for _, time, _ in found if start_s < time < start_s + lasts_s)}
            for at_s in times:
                busy = [
                    problem.nodes[job[0]].points[job[1]].of_types
                    for job, first_s, last_s in found
                    if first_s <= at_s < last_s
                ]
                if any(
                    sum(column) > most
                    for *column, most in zip(*busy, taken, problem.devices_of_types, strict=True)
                ):
                    return False
            return True

        starts = sorted({ready_s, *(end_s for _, _, end_s in found if end_s > ready_s)})
        start_s = next(each for each in starts if fits(each))
        found.append(((node, point, ops), start_s, start_s + lasts_s))
    return spans(found)


@given(seed=SEEDS)
@examples(150)
def test_every_job_starts_at_the_earliest_possible_time(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(random, most_types=3)
    jobs = random_jobs(problem, random)
    backfill = Backfill(problem)
    timed, end_s = backfill.timed(jobs)
    assert spans(timed) == by_all_starts(problem, jobs)
    assert what_is_wrong(problem, timed) == []
    assert end_s == end_of(timed)
    from_end, _ = backfill.timed(last_ended_first(timed), backwards=True)
    assert spans(from_end) == by_all_starts(problem, last_ended_first(timed), backwards=True)


@given(seed=SEEDS)
@examples(100)
def test_a_schedule_that_is_justified_ends_no_later(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(random)
    backfill = Backfill(problem)
    timed, end_s = backfill.timed(random_jobs(problem, random))
    again, again_s = backfill.justified(timed)
    assert again_s <= end_s
    assert again_s == end_of(again)
    assert what_is_wrong(problem, again) == []
    assert sorted(job for job, *_ in again) == sorted(job for job, *_ in timed)


@given(seed=SEEDS)
@examples(100)
def test_a_changed_list_has_the_times_that_it_has_by_itself_whatever_was_kept(seed: int) -> None:
    """From every job on, and within what it takes."""
    random = Random(seed)
    problem = random_problem(random)
    backfill = Backfill(problem)
    jobs = random_jobs(problem, random)
    trail = backfill.trail(jobs)
    assert trail.timed == backfill.timed(jobs)[0]
    assert len(trail.states) == len(jobs) // STRIDE + 1
    for first in range(len(jobs) + 1):
        changed = jobs[:first]
        for node, _, ops in jobs[first:]:
            changed += [(node, random.randrange(len(problem.nodes[node].points)), 1)] * ops
        before = deepcopy(trail)
        expected = backfill.timed(changed)
        assert backfill.changed(trail, changed, first, expected[1]) == expected
        assert backfill.changed(trail, changed, first, expected[1] - 1 / 16) is None
        assert backfill.trail(changed, trail, first) == backfill.trail(changed)
        assert trail == before


def test_a_state_is_kept_before_every_so_manyth_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a list that ends with such a one: then there is nothing left to time."""
    problem = problem_of({"fast": 1}, a=Has(12, [((1,), 1.0)]))
    backfill = Backfill(problem)
    jobs = [(0, 0, 1)] * 2 * STRIDE
    trail = backfill.trail(jobs)
    assert [state.ends for state in trail.states] == [[0.0], [5.0], [10.0]]
    monkeypatch.setattr(backfill_module.Backfill, "_empty", None)
    for first in range(len(jobs) + 1):
        assert backfill.changed(trail, jobs, first, 10.0) == (trail.timed, 10.0)
