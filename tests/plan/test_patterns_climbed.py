"""Schedules changed at random, one job after the other: what always holds, and what is found by hand."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from by_points import Has, chain_behind_two, problem_of, random_jobs, random_problem, what_is_wrong
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from spindle_cli.plan.patterns import climb as climb_module
from spindle_cli.plan.patterns.backfill import Backfill, Trail
from spindle_cli.plan.patterns.beyond_compute import BeyondCompute
from spindle_cli.plan.patterns.climb import (
    AS_ELSEWHERE,
    EFFORT_PER_ATTEMPT,
    JOB_SHARE,
    JUSTIFIED,
    MOVED,
    PASSED_ON,
    Climber,
    Schedule,
    scheduled,
)
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.listing import Job, Timed

GB = 10**9


def start_of(problem: Problem, jobs: Sequence[Job]) -> Schedule:
    return scheduled(*Backfill(problem).timed(jobs), BeyondCompute(problem))


def climbed(problem: Problem, start: Schedule, effort: int, seed: int = 0) -> Schedule:
    return Climber(problem, Backfill(problem), BeyondCompute(problem)).climbed(start, effort, Random(seed))


def drawn(seed: int) -> tuple[Problem, Schedule]:
    random = Random(seed)
    problem = random_problem(random)
    return problem, start_of(problem, random_jobs(problem, random))


def test_a_schedule_lasts_as_long_as_its_jobs_and_what_is_beyond() -> None:
    """A sum of 3 GB at 10 GB/s, which hides behind nothing."""
    has = Has(1, [((1, 1), 0.1)], (), {"param_bytes_per_op": 3 * GB})
    problem = problem_of({"fast": 1, "slow": 1}, a=has)
    found = start_of(problem, [(0, 0, 1)])
    assert (found.end_s, found.timed) == (0.1, [((0, 0, 1), 0.0, 0.1)])
    assert found.iteration_s == pytest.approx(0.1 + 0.3, rel=1e-2)


def test_without_effort_nothing_is_changed() -> None:
    problem, start = drawn(3)
    assert all(climbed(problem, start, 0, seed) is start for seed in range(20))
    assert not all(climbed(problem, start, 1, seed) is start for seed in range(20))


@given(seed=st.integers(0, 10**6), justified=st.sampled_from((JUSTIFIED, 1.0)))
@examples(300)
def test_what_is_climbed_is_valid_and_no_worse_but_for_fewer_jobs(seed: int, justified: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(climb_module, "JUSTIFIED", justified)
        of_climbing(seed)


def of_climbing(seed: int) -> None:
    problem, start = drawn(seed)
    found = climbed(problem, start, 600, seed)
    assert what_is_wrong(problem, found.timed) == []
    fewer = len(start.timed) - len(found.timed)
    assert found.iteration_s <= start.iteration_s + JOB_SHARE * start.end_s * fewer + 1e-9
    # What it says of itself holds of its jobs, too, one by one from the start.
    again = start_of(problem, [job for job, *_ in found.timed])
    assert again.end_s == pytest.approx(found.end_s)
    assert again.iteration_s == pytest.approx(found.iteration_s)
    assert climbed(problem, start, 600, seed) == found


def test_what_is_justified_is_changed_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is added here, and it ends no later: it is always kept."""
    monkeypatch.setattr(climb_module, "JUSTIFIED", 1.0)
    ends: list[float] = []
    gained: list[float] = []
    changed, justified = Backfill.changed, Backfill.justified

    def noted(self: Backfill, trail: Trail, *more: Any) -> Any:
        assert not ends or max(end_s for *_, end_s in trail.timed) == pytest.approx(ends[-1])
        return changed(self, trail, *more)

    def noted_justified(self: Backfill, timed: Sequence[Timed]) -> Any:
        found = justified(self, timed)
        gained.append(max(end_s for *_, end_s in timed) - found[1])
        ends.append(found[1])
        return found

    monkeypatch.setattr(Backfill, "changed", noted)
    monkeypatch.setattr(Backfill, "justified", noted_justified)
    points = [((1,), 1.0), ((2,), 0.625)]
    for seed in range(10):
        ends.clear()
        problem = problem_of(
            {"fast": 3}, **{f"m{n}": Has(1 + n, points, () if n < 4 else (f"m{n - 4}",)) for n in range(7)}
        )
        climbed(problem, start_of(problem, random_jobs(problem, Random(seed))), 2000, seed)
    assert max(gained) > 0.1


def test_what_is_justified_is_left_where_its_sums_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here justification would have a run on both types, a second shorter, and 3 s of sums longer."""
    monkeypatch.setattr(climb_module, "JUSTIFIED", 1.0)
    asked: list[float] = []

    def justified(self: Backfill, timed: Sequence[Timed]) -> tuple[list[Timed], float]:
        found = self.timed([(node, 1 if node == 0 else point, ops) for (node, point, ops), *_ in timed])
        asked.append(found[1])
        return found

    monkeypatch.setattr(Backfill, "justified", justified)
    problem = problem_of(
        {"fast": 1, "slow": 1},
        a=Has(1, [((1, 0), 2.0), ((1, 1), 1.0)], (), {"param_bytes_per_op": 30 * GB}),
        b=Has(1, [((0, 1), 1.0), ((1, 0), 0.25)], ("a",)),
    )
    found = climbed(problem, start_of(problem, [(0, 0, 1), (1, 0, 1)]), 400)
    assert min(asked) == 1.25
    assert [job for job, *_ in found.timed] == [(0, 0, 1), (1, 1, 1)]
    assert found.iteration_s == pytest.approx(2.25)


def test_another_seed_has_other_changes() -> None:
    problem, start = drawn(8)
    assert len({tuple(climbed(problem, start, 200, seed).timed) for seed in range(5)}) > 1


def test_a_job_is_moved_to_where_it_is_in_no_ones_way() -> None:
    """A chain of 1 and 3 s behind two jobs of 1 and 3 s on two devices ends at 5 s; before them at 4 s."""
    problem = chain_behind_two()
    start = start_of(problem, [(node, 0, 1) for node in range(4)])
    assert start.end_s == 5.0
    assert climbed(problem, start, 1000).end_s == 4.0


def test_ops_go_to_other_allocations_and_all_to_the_best_of_two() -> None:
    """Of three ops in a row on one device, one on both is the way to end soonest; all of them there."""
    problem = problem_of({"fast": 3}, a=Has(4, [((1,), 2.0), ((2,), 1.5), ((3,), 0.5)]))
    start = start_of(problem, [(0, 0, 2), (0, 1, 2)])
    assert start.end_s == 7.0
    found = climbed(problem, start, 2000)
    assert (found.end_s, {job[:2] for job, *_ in found.timed}) == (2.0, {(0, 2)})


@pytest.mark.parametrize(("slower", "num_jobs"), [(0.5 * JOB_SHARE, 2), (5 * JOB_SHARE, 3)])
@pytest.mark.parametrize("second", [1.0, 0.01, 100.0])
def test_a_job_less_may_cost_a_little(slower: float, num_jobs: int, second: float) -> None:
    """a has an op on each device while b has the fast one; both on the slow one take a little longer."""
    slow_s = (1.0 + 2 * slower) * second
    problem = problem_of(
        {"fast": 1, "slow": 1},
        a=Has(2, [((0, 1), slow_s), ((1, 0), second)]),
        b=Has(1, [((1, 0), second)]),
    )
    start = start_of(problem, [(0, 0, 1), (1, 0, 1), (0, 1, 1)])
    assert start.end_s == pytest.approx(slow_s + second)
    found = climbed(problem, start, 3000)
    assert len(found.timed) == num_jobs
    assert found.end_s == pytest.approx(2 * slow_s if num_jobs == 2 else slow_s + second)


def test_what_sums_add_is_part_of_what_is_kept() -> None:
    """Of 30 GB a sum over both types takes 3 s, more than the second that the other device saves."""
    points = [((1, 0), 2.0), ((1, 1), 1.0)]
    for param_bytes, expected in ((30 * GB, 0), (2**10, 1)):
        has = Has(1, points, (), {"param_bytes_per_op": param_bytes})
        problem = problem_of({"fast": 1, "slow": 1}, a=has)
        for first in (0, 1):
            found = climbed(problem, start_of(problem, [(0, first, 1)]), 500)
            assert [job for job, *_ in found.timed] == [(0, expected, 1)]


def test_effort_is_of_attempts_and_the_jobs_that_each_times_again(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, start = drawn(4)
    spent: list[int] = []
    changed = Backfill.changed

    def noted(self: Backfill, trail: Trail, jobs: Sequence[Job], first: int, within_s: float) -> Any:
        spent.append(len(trail.timed) - first + EFFORT_PER_ATTEMPT)
        assert [job for job, *_ in trail.timed][:first] == list(jobs)[:first]
        return changed(self, trail, jobs, first, within_s)

    monkeypatch.setattr(Backfill, "changed", noted)
    climbed(problem, start, 500)
    assert sum(spent) >= 500 > sum(spent[:-1])


def moves(problem: Problem, jobs: list[Job], attempts: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The lists of jobs that an attempt makes by moving one, as names of their MetaOps."""
    monkeypatch.setattr(climb_module, "PASSED_ON", 0.0)
    monkeypatch.setattr(climb_module, "MOVED", 1.0)
    names = [node.metaop.name for node in problem.nodes]
    tried: set[str] = set()

    def noted(_: Backfill, trail: Trail, changed: Sequence[Job], first: int, within_s: float) -> None:
        tried.add("".join(names[job[0]] for job in changed))

    monkeypatch.setattr(Backfill, "changed", noted)
    for seed in range(attempts):
        climbed(problem, start_of(problem, jobs), 1, seed)
    return tried


def test_jobs_are_moved_to_all_places_between_what_they_wait_for_and_what_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """c waits for a, and b for nothing; d for c, so for a too."""
    one = [((1,), 1.0)]
    problem = problem_of(
        {"fast": 8}, a=Has(1, one), b=Has(1, one), c=Has(1, one, ("a",)), d=Has(1, one, ("c",))
    )
    # In order of start: a and b, c, d.
    found = moves(problem, [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)], 200, monkeypatch)
    assert found == {"abcd", "bacd", "acbd", "acdb"}


def test_jobs_of_a_node_do_not_pass_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [((1,), 1.0), ((2,), 0.5)]
    problem = problem_of({"fast": 8}, a=Has(2, points), b=Has(1, points, ("a",)))
    jobs = [(0, 0, 1), (0, 1, 1), (1, 0, 1)]
    assert moves(problem, jobs, 50, monkeypatch) == {"aab"}
    # d waits for c through b alone, which is not behind it in the list.
    chain = problem_of(
        {"fast": 8}, c=Has(1, points), b=Has(1, points, ("c",)), d=Has(1, points, ("b",)), e=Has(1, points)
    )
    found = moves(chain, [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)], 300, monkeypatch)
    assert found == {"cebd", "ecbd", "cbed", "cbde"}


def attempts(
    problem: Problem, jobs: list[Job], count: int, monkeypatch: pytest.MonkeyPatch
) -> list[list[Job]]:
    """The lists of jobs of so many first attempts."""
    tried: list[list[Job]] = []

    def noted(_: Backfill, trail: Trail, changed: Sequence[Job], first: int, within_s: float) -> None:
        tried.append(list(changed))

    monkeypatch.setattr(Backfill, "changed", noted)
    for seed in range(count):
        climbed(problem, start_of(problem, jobs), 1, seed)
    return tried


@pytest.mark.parametrize(("num_points", "reached"), [(9, range(9)), (11, range(9)), (3, range(3))])
def test_all_some_or_one_of_the_ops_of_a_job_go_to_an_allocation_nearby(
    monkeypatch: pytest.MonkeyPatch, num_points: int, reached: range
) -> None:
    """From the fifth up to four places along, or as far as there are any."""
    monkeypatch.setattr(climb_module, "PASSED_ON", 0.0)
    monkeypatch.setattr(climb_module, "MOVED", 0.0)
    points = [((count,), 20.0 - count) for count in range(1, num_points + 1)]
    own = min(4, num_points - 1)
    found = attempts(problem_of({"fast": 11}, a=Has(6, points)), [(0, own, 6)], 800, monkeypatch)
    all_ops = [[(0, point, 6)] for point in reached]
    some = [[(0, own, 6 - ops), (0, point, ops)] for point in reached for ops in (1, 3)]
    assert all(each in [*all_ops, *some] for each in found)
    assert all(each in found for each in [*all_ops, *some])
    assert sum(len(each) == 1 for each in found) / 800 == pytest.approx(0.5, abs=0.06)
    # Half of the time as elsewhere in the schedule, which here is the same allocation.
    if num_points > 4:
        assert sum(each[-1][1] == own for each in found) / 800 == pytest.approx(AS_ELSEWHERE, abs=0.06)


def test_what_ops_cannot_be_passed_on_to_is_moved_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [((count,), 20.0 - count) for count in range(1, 10)]
    monkeypatch.setattr(climb_module, "AS_ELSEWHERE", 0.0)
    found = attempts(problem_of({"fast": 9}, a=Has(6, points)), [(0, 4, 6)], 800, monkeypatch)
    kept = sum(each == [(0, 4, 6)] for each in found)
    assert kept / 800 == pytest.approx(PASSED_ON + MOVED, abs=0.06)


def test_other_allocations_are_those_that_the_start_has_for_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climb_module, "PASSED_ON", 0.0)
    monkeypatch.setattr(climb_module, "MOVED", 0.0)
    monkeypatch.setattr(climb_module, "AS_ELSEWHERE", 1.0)
    points = [((count,), 20.0 - count) for count in range(1, 10)]
    problem = problem_of({"fast": 9}, a=Has(2, points), b=Has(1, points))
    jobs = [(0, 8, 1), (0, 2, 1), (1, 5, 1)]
    found = {job[:2] for each in attempts(problem, jobs, 200, monkeypatch) for job in each}
    assert found == {(0, 8), (0, 2), (1, 5)}


def test_ops_are_passed_on_to_any_job_of_the_same_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climb_module, "PASSED_ON", 1.0)
    points = [((1,), 3.0), ((2,), 2.0), ((3,), 1.0)]
    problem = problem_of({"fast": 3}, a=Has(9, points), b=Has(1, points, ("a",)))
    jobs = [(0, 0, 4), (0, 1, 1), (0, 2, 4), (1, 0, 1)]
    found = [each for each in attempts(problem, jobs, 400, monkeypatch) if each[-1] == jobs[-1]]
    passed = {tuple(num_ops for node, _, num_ops in each if node == 0) for each in found}
    passed -= {(4, 1, 4)}  # of b, which has no other job
    by_one = {(3, 2, 4), (3, 1, 5), (5, 4), (4, 5), (5, 1, 3), (4, 2, 3)}
    by_two, all_of_them = {(2, 3, 4), (2, 1, 6), (6, 1, 2), (4, 3, 2)}, {(5, 4), (1, 8), (8, 1), (4, 5)}
    assert passed == by_one | by_two | all_of_them
