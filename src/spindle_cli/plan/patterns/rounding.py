"""Jobs of whole ops from a sequence of patterns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from spindle_cli.plan.bound.knapsack import Pattern
from spindle_cli.plan.patterns.side_by_side import Set
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.listing import Job

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
