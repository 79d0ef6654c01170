"""List scheduling: from an order of jobs to their times."""

from __future__ import annotations

from collections.abc import Sequence

from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import UnplacedSlice

# Some next ops of a node on one of its points: (node, index of the point, number of ops). A list of jobs in
# order is a schedule without times. A plain tuple: a search makes millions.
Job = tuple[int, int, int]
Timed = tuple[Job, float, float]  # a job, its start and its end in seconds


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
        node, point, num_ops = job
        needed, op_s = rates[node][point]
        start_s = node_end[node]
        for producer in inputs[node]:
            start_s = max(start_s, node_end[producer])
        count = used = 0
        for free_s, number in free:
            if count >= needed and free_s > start_s:
                break
            start_s = max(start_s, free_s)
            count += number
            used += 1
        end_s = start_s + num_ops * op_s
        free = _occupied(free, used, needed, end_s)
        node_end[node] = end_s
        timed.append((job, start_s, end_s))
    return timed


def turned_round(problem: Problem, jobs: Sequence[Job]) -> list[Job]:
    """The jobs of a schedule made backwards, in the order in which they start forwards; it ends no later."""
    timed = time_jobs(problem, jobs, backwards=True)
    return [job for job, _, _ in sorted(timed, key=lambda item: -item[2])]


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


def to_pieces(problem: Problem, timed: Sequence[Timed]) -> tuple[UnplacedSlice, ...]:
    """Pieces in order of start; jobs that follow each other on one allocation without a gap become one."""
    done = [node.first_op for node in problem.nodes]
    last: dict[int, int] = {}  # node -> index of its latest slice
    pieces: list[UnplacedSlice] = []
    for (node, index, num_ops), start_s, end_s in sorted(timed, key=lambda item: item[1]):
        point = problem.nodes[node].points[index]
        first = done[node]
        done[node] += num_ops
        before = pieces[last[node]] if node in last else None
        if before is not None and before.point is point and before.end_s == start_s:
            pieces[last[node]] = UnplacedSlice(node, before.first, done[node], point, before.start_s, end_s)
            continue
        last[node] = len(pieces)
        pieces.append(UnplacedSlice(node, first, done[node], point, start_s, end_s))
    return tuple(pieces)
