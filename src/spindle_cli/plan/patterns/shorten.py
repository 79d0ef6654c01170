"""Schedules made shorter: by the patterns that their order allows, rounded to whole ops, and by changes at
random from there.

What a search finds job by job leaves devices idle where allocations do not fit side by side; the program
chooses those that do together (`program.py`). What comes out has an order of its own, for which the program
is solved again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from spindle_cli.plan.bound.knapsack import Pattern
from spindle_cli.plan.bound.patterns import patterns_of
from spindle_cli.plan.patterns.backfill import Backfill
from spindle_cli.plan.patterns.beyond_compute import BeyondCompute
from spindle_cli.plan.patterns.climb import Climber, Schedule, scheduled
from spindle_cli.plan.patterns.program import KnownPatterns, PatternProgram
from spindle_cli.plan.patterns.side_by_side import Set, sets_in_order
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.listing import Job, Timed

# Programs count these shares of the sums of gradients.
SUM_WEIGHTS = (0.0, 0.2)
# So many orders are followed by each program, those in which sequences of patterns are shortest; for that the
# sequences of so many of the shortest schedules are compared, generated in so many rounds.
MOST_ORDERS = 2
MOST_COMPARED, QUICK_ROUNDS = 5, 2
# A sequence of patterns is rounded in so many of the turns that it may take.
NUM_TURNS = 24
# What is rounded is changed at random for one so manyth of the effort, and so many of the best for longer.
SHORT, MOST_CLIMBED, LONG = 12, 2, 4


class Shortener:
    """Shortens schedules of one problem. Deterministic: random numbers have a fixed seed.

    Args:
        prices: of a second of a device of each type, in seconds of the schedule.
    """

    def __init__(self, problem: Problem, prices: Sequence[float]) -> None:
        self._problem = problem
        self._beyond = BeyondCompute(problem)
        self._known = KnownPatterns()
        self._programs = [
            PatternProgram(self._beyond.counted(weight), prices, self._known) for weight in SUM_WEIGHTS
        ]
        self._backfill = Backfill(problem)

    def shortened(self, schedules: Sequence[Sequence[Timed]], effort: int, seed: int) -> list[list[Timed]]:
        """Schedules that follow the order of some of these, and are mostly shorter, with what sums and moving
        activations add to them; the shortest first, each once.

        Args:
            schedules: at least one.
            effort: jobs to time in all changes at random together.
            seed: another seed, other changes.

        Raises:
            SolverError: the solver failed (never for a valid problem).
        """
        random = Random(seed)  # noqa: S311 - reproducible, not secret
        known = sorted((self._scheduled(timed) for timed in schedules), key=_iteration_s)
        found = [
            self._followed(schedule, sets, program, effort // SHORT, random)
            for program in self._programs
            for schedule, sets in self._best_orders(program, known)
        ]
        best = min(found, key=_iteration_s)
        sets = sets_in_order(self._problem, best.timed)
        found += [self._followed(best, sets, each, effort // SHORT, random) for each in self._programs]
        found.sort(key=_iteration_s)
        found[:MOST_CLIMBED] = [
            self._climbed(schedule, effort // LONG, random) for schedule in found[:MOST_CLIMBED]
        ]
        different = {
            frozenset(schedule.timed): schedule.timed for schedule in sorted(found, key=_iteration_s)
        }
        return list(different.values())

    def _best_orders(
        self, program: PatternProgram, schedules: Sequence[Schedule]
    ) -> list[tuple[Schedule, tuple[Set, ...]]]:
        """The schedules with different sets, those first whose sequences of patterns are shortest."""
        of_sets: dict[tuple[Set, ...], Schedule] = {}
        for schedule in schedules:
            spans = [(job[0], job[1], start_s, end_s) for job, start_s, end_s in schedule.timed]
            self._known.add(patterns_of(spans))
            of_sets.setdefault(tuple(sets_in_order(self._problem, schedule.timed)), schedule)
        compared = list(of_sets.items())[:MOST_COMPARED]
        lengths_s = [
            sum(seconds for _, seconds in program.shortest(sets, QUICK_ROUNDS)) for sets, _ in compared
        ]
        best = sorted(range(len(compared)), key=lengths_s.__getitem__)[:MOST_ORDERS]
        return [(compared[number][1], compared[number][0]) for number in best]

    def _followed(
        self,
        schedule: Schedule,
        sets: Sequence[Set],
        program: PatternProgram,
        effort: int,
        random: Random,
    ) -> Schedule:
        """The best schedule in the order of this one."""
        patterns = program.shortest(sets)
        rounded = [
            self._rounded(in_turn(patterns, sets, random), over_gaps=random.random() < 0.5)
            for _ in range(NUM_TURNS)
        ]
        return self._climbed(min([schedule, *rounded], key=_iteration_s), effort, random)

    def _rounded(self, patterns: Sequence[tuple[Pattern, float]], *, over_gaps: bool) -> Schedule:
        jobs = jobs_of(self._problem, patterns, over_gaps=over_gaps)
        once, end_s = self._backfill.timed(jobs)
        again = scheduled(*self._backfill.justified(once), self._beyond)
        return min(scheduled(once, end_s, self._beyond), again, key=_iteration_s)

    def _climbed(self, schedule: Schedule, effort: int, random: Random) -> Schedule:
        return Climber(self._problem, self._backfill, self._beyond).climbed(schedule, effort, random)

    def _scheduled(self, timed: Sequence[Timed]) -> Schedule:
        return scheduled(list(timed), max(end_s for _, _, end_s in timed), self._beyond)


def _iteration_s(schedule: Schedule) -> float:
    return schedule.iteration_s


# How much of an allocation that goes on from one pattern to the next chance counts for in their order.
CHANCE = 1.5


@dataclass
class _Run:
    """A node on one allocation from pattern to pattern.

    Attributes:
        seconds: all together.
        last: number of the last pattern that it is in.
    """

    node: int
    point: int
    seconds: float
    last: int


def in_turn(
    patterns: Sequence[tuple[Pattern, float]], sets: Sequence[Set], random: Random
) -> list[tuple[Pattern, float]]:
    """The patterns in an order that keeps producers before consumers, partly at random: each with one of the
    sets that has its nodes, and of those of one set preferably such as go on with allocations of the last.
    """
    of_set: list[list[tuple[Pattern, float]]] = [[] for _ in sets]
    for each in patterns:
        possible = [number for number, nodes in enumerate(sets) if each[0].keys() <= nodes]
        of_set[random.choice(possible)].append(each)
    found: list[tuple[Pattern, float]] = []
    last: Pattern = {}
    for left in of_set:
        while left:
            goes_on = [
                sum(last.get(node) == point for node, point in pattern.items()) + CHANCE * random.random()
                for pattern, _ in left
            ]
            found.append(left.pop(goes_on.index(max(goes_on))))
            last = found[-1][0]
    return found


def jobs_of(problem: Problem, patterns: Sequence[tuple[Pattern, float]], *, over_gaps: bool) -> list[Job]:
    """Jobs in order of start, each node's ops complete: so many ops of a node are done at the end of a job as
    come nearest to what the patterns have done until then.

    Args:
        over_gaps: whether a node that has the same allocation again after others ran, but none of its own,
            goes on with one job.
    """
    runs = _runs(patterns, over_gaps=over_gaps)
    last_of = {run.node: run for run in runs}
    ops, done = [0.0] * len(problem.nodes), [0] * len(problem.nodes)
    jobs: list[Job] = []
    for run in runs:
        node = problem.nodes[run.node]
        ops[run.node] += run.seconds / node.points[run.point].op_s
        until = node.num_ops if run is last_of[run.node] else min(round(ops[run.node]), node.num_ops)
        if until > done[run.node]:
            jobs.append((run.node, run.point, until - done[run.node]))
            done[run.node] = until
    return jobs


def _runs(patterns: Sequence[tuple[Pattern, float]], *, over_gaps: bool) -> list[_Run]:
    """In order of start."""
    runs: list[_Run] = []
    latest: dict[int, _Run] = {}
    for number, (pattern, seconds) in enumerate(patterns):
        for node, point in pattern.items():
            run = latest.get(node)
            if run is None or run.point != point or not (over_gaps or run.last == number - 1):
                run = latest[node] = _Run(node, point, 0.0, number)
                runs.append(run)
            run.seconds += seconds
            run.last = number
    return runs
