"""Changing one job of a schedule after the other, keeping what makes it shorter."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from spindle_cli.plan.bound.patterns import ancestors
from spindle_cli.plan.patterns.backfill import Backfill, first_started_first
from spindle_cli.plan.patterns.beyond_compute import BeyondCompute
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.listing import Job, Timed

# What a job more may cost, as a share of the schedule: it is a slice to start.
JOB_SHARE = 2e-4
# How often what is kept is justified as well.
JUSTIFIED = 0.1
# What an attempt costs beyond its jobs, in jobs.
EFFORT_PER_ATTEMPT = 10
# How often ops are passed on between a MetaOp's jobs; a job is moved in the list; or else gets another
# allocation, this often one that the schedule has elsewhere.
PASSED_ON, MOVED = 0.4, 0.3
AS_ELSEWHERE = 0.5
# By how many places an allocation is moved along the MetaOp's.
OTHER_POINTS = (-4, -3, -2, -1, 1, 2, 3, 4)


class Schedule(NamedTuple):
    """Jobs with their times, when the last one ends, and when about the iteration does."""

    timed: list[Timed]
    end_s: float
    iteration_s: float


def scheduled(timed: list[Timed], end_s: float, beyond: BeyondCompute) -> Schedule:
    """A schedule with what sums and moving activations add to it."""
    return Schedule(timed, end_s, end_s + beyond.added_s(timed))


class Climber:
    """Changes schedules of one problem."""

    def __init__(self, problem: Problem, backfill: Backfill, beyond: BeyondCompute) -> None:
        self._backfill = backfill
        self._beyond = beyond
        self._num_points = [len(node.points) for node in problem.nodes]
        self._waits_for = ancestors(problem)

    def climbed(self, start: Schedule, effort: int, random: Random) -> Schedule:
        """A schedule no worse than this one, but for fewer jobs.

        Args:
            effort: jobs to time, of all attempts together.
        """
        job_s = JOB_SHARE * start.end_s
        liked = _points_of(start.timed, len(self._num_points))
        best, trail = start, self._backfill.trail(first_started_first(start.timed))
        while effort > 0:
            jobs = [job for job, _, _ in trail.timed]
            changed = self._changed(jobs, liked, random)
            first = _first_change(jobs, changed)
            effort -= len(jobs) - first + EFFORT_PER_ATTEMPT
            limit_s = best.iteration_s + job_s * (len(jobs) - len(changed))
            found = self._backfill.changed(trail, changed, first, limit_s)
            if found is None or _is_same(found[0], trail.timed):
                continue
            after = scheduled(*found, self._beyond)
            if after.iteration_s > limit_s:
                continue
            best, trail = after, self._backfill.trail(changed, trail, first)
            if random.random() < JUSTIFIED:
                again = scheduled(*self._backfill.justified(best.timed), self._beyond)
                if again.iteration_s <= best.iteration_s:
                    best, trail = again, self._backfill.trail(first_started_first(again.timed))
        return best

    def _changed(self, jobs: Sequence[Job], liked: Sequence[Sequence[int]], random: Random) -> list[Job]:
        """The list with one thing changed."""
        changed = list(jobs)
        place = random.randrange(len(changed))
        kind = random.random()
        if kind < PASSED_ON and _pass_on(changed, place, random):
            return changed
        if kind < PASSED_ON + MOVED:
            self._move(changed, place, random)
        else:
            self._reallocate(changed, place, liked, random)
        return changed

    def _move(self, jobs: list[Job], place: int, random: Random) -> None:
        """A job elsewhere in the list, behind what it waits for and before what waits for it."""
        job = jobs.pop(place)
        node, before = job[0], self._waits_for[job[0]]
        earliest, latest = place, place
        while earliest > 0 and jobs[earliest - 1][0] != node and jobs[earliest - 1][0] not in before:
            earliest -= 1
        while latest < len(jobs) and jobs[latest][0] != node and node not in self._waits_for[jobs[latest][0]]:
            latest += 1
        jobs.insert(random.randint(earliest, latest), job)

    def _reallocate(
        self, jobs: list[Job], place: int, liked: Sequence[Sequence[int]], random: Random
    ) -> None:
        """A job, or its last ops, on another allocation."""
        node, point, num_ops = jobs[place]
        if random.random() < AS_ELSEWHERE:
            other = random.choice(liked[node])
        else:
            other = min(max(point + random.choice(OTHER_POINTS), 0), self._num_points[node] - 1)
        moved = random.choice((num_ops, num_ops, max(1, num_ops // 2), 1))
        jobs[place : place + 1] = [(node, point, num_ops - moved), (node, other, moved)][moved == num_ops :]


def _pass_on(jobs: list[Job], place: int, random: Random) -> bool:
    """Some or all ops of a job to another one of the same node; False if there is none."""
    node, point, num_ops = jobs[place]
    others = [number for number, job in enumerate(jobs) if job[0] == node and number != place]
    if not others:
        return False
    other = random.choice(others)
    moved = min(random.choice((1, 1, 1, 2, num_ops)), num_ops)
    jobs[other] = (node, jobs[other][1], jobs[other][2] + moved)
    if moved == num_ops:
        del jobs[place]
    else:
        jobs[place] = (node, point, num_ops - moved)
    return True


def _first_change(jobs: Sequence[Job], changed: Sequence[Job]) -> int:
    """How many jobs at the start of both lists are the same."""
    place = 0
    for before, after in zip(jobs, changed, strict=False):
        if before != after:
            break
        place += 1
    return place


def _is_same(timed: Sequence[Timed], other: Sequence[Timed]) -> bool:
    """Whether two lists have the same jobs at the same times, in whatever order."""
    return len(timed) == len(other) and set(timed) == set(other)


def _points_of(timed: Sequence[Timed], num_nodes: int) -> list[list[int]]:
    """The points that a schedule has for each node."""
    points: list[set[int]] = [set() for _ in range(num_nodes)]
    for (node, point, _), _, _ in timed:
        points[node].add(point)
    return [sorted(each) for each in points]
