"""List scheduling: from an order of jobs to their times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Piece


class Job(NamedTuple):
    """Some next ops of a node on one of its points; a list of jobs in order is a schedule without times."""

    node: int
    point: int  # index into the node's points
    num_ops: int


class Timed(NamedTuple):
    """A job with its times."""

    job: Job
    start_s: float
    end_s: float


def time_jobs(problem: Problem, jobs: Sequence[Job], *, backwards: bool = False) -> list[Timed]:
    """Start each job, in the order given, as early as its devices and its inputs allow.

    No job moves in front of an earlier one on the same devices. Among devices that are free in time a job
    takes those that became free last, so that the others stay useful for what starts earlier.

    Args:
        jobs: producers before consumers, each node's ops complete.
        backwards: the other way round, consumers before producers.
    """
    rates = problem.rates
    inputs = [node.consumers if backwards else node.inputs for node in problem.nodes]
    free: list[tuple[float, int]] = [(0.0, problem.num_devices)]  # (free from, number of devices), ascending
    node_end = [0.0] * len(rates)
    timed: list[Timed] = []
    for job in jobs:
        needed, op_s = rates[job.node][job.point]
        start_s = node_end[job.node]
        for producer in inputs[job.node]:
            start_s = max(start_s, node_end[producer])
        count = used = 0
        for free_s, number in free:
            if count >= needed and free_s > start_s:
                break
            start_s = max(start_s, free_s)
            count += number
            used += 1
        end_s = start_s + job.num_ops * op_s
        free = _occupied(free, used, needed, end_s)
        node_end[job.node] = end_s
        timed.append(Timed(job, start_s, end_s))
    return timed


def turned_round(problem: Problem, jobs: Sequence[Job]) -> list[Job]:
    """The jobs of a schedule made backwards, in the order in which they start forwards; it ends no later."""
    timed = time_jobs(problem, jobs, backwards=True)
    return [item.job for item in sorted(timed, key=lambda item: -item.end_s)]


def _occupied(free: list[tuple[float, int]], used: int, needed: int, end_s: float) -> list[tuple[float, int]]:
    """`free` after `needed` devices of its first `used` entries, the last free first, run to `end_s`."""
    first, left = used, needed
    while left > 0:
        first -= 1
        left -= free[first][1]
    kept = free[:first]
    if left < 0:
        kept.append((free[first][0], -left))
    place = used
    while place < len(free) and free[place][0] < end_s:
        place += 1
    return [*kept, *free[used:place], (end_s, needed), *free[place:]]


def to_pieces(problem: Problem, timed: Sequence[Timed]) -> tuple[Piece, ...]:
    """Pieces in order of start; jobs that follow each other on one allocation without a gap become one."""
    done = [0] * len(problem.nodes)
    last: dict[int, int] = {}  # node -> index of its latest piece
    pieces: list[Piece] = []
    for job, start_s, end_s in sorted(timed, key=lambda item: item.start_s):
        point = problem.nodes[job.node].points[job.point]
        first = done[job.node]
        done[job.node] += job.num_ops
        before = pieces[last[job.node]] if job.node in last else None
        if before is not None and before.point is point and before.end_s == start_s:
            pieces[last[job.node]] = Piece(
                job.node, before.first, done[job.node], point, before.start_s, end_s
            )
            continue
        last[job.node] = len(pieces)
        pieces.append(Piece(job.node, first, done[job.node], point, start_s, end_s))
    return tuple(pieces)
