"""Searching for a better schedule: many dispatches, each with a slightly different guide, keeping what helps.

1. a grid of guides, forwards and backwards; on large clusters also of dispatches in which MetaOps take whole
   groups of devices alone, of which there are far fewer, and hardly fewer good ones
2. from the best few, random changes of the guide as a whole: stretch, urgency, slack
3. random changes of single decisions too: other devices, fewer ops, waiting, going first
Between rounds the worse half is dropped. Deterministic: the random numbers come from a fixed seed, and the
effort is counted in dispatches, not in seconds.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import log2

from spindle_cli.plan.bound.bound import Bound, lower_bound
from spindle_cli.plan.problem import Node, Problem
from spindle_cli.plan.search import draws
from spindle_cli.plan.search.climb import LEAST_FITS, Dispatcher, Trial
from spindle_cli.plan.search.listing import Job, turned_round

GRID_SLACK = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2)
# Guides that are kept of each direction, of all groups together.
KEPT_PER_DIRECTION = 4
# Above so many devices, in groups of powers of two, into at least so many groups.
MOST_ONE_BY_ONE = 64
NUM_GROUPS = (128, 64, 32)
ROUNDS = 3
# The search ends when it is so close to the bound: what remains is less than the curves are known.
CLOSE_ENOUGH = 0.001


def search(problem: Problem, bound: Bound, effort: int, seed: int) -> list[tuple[Job, ...]]:
    """The schedules found, the best first.

    Args:
        effort: how long to search beyond the grid: jobs to dispatch, of all the schedules tried together.
        seed: another seed, another search.
    """
    random = draws.state_of(seed)
    sizes = group_sizes(problem.num_devices)
    kept = -(-KEPT_PER_DIRECTION // len(sizes))
    trials = _grid(problem, bound, kept)
    for size in sizes[1:]:
        grouped = in_groups(problem, size)
        trials += _grid(grouped, lower_bound(grouped), kept)
    alive = trials
    close_s = bound.lower_bound_s * (1 + CLOSE_ENOUGH)
    for number in range(ROUNDS):
        for trial in alive:
            trial.climb(random, effort // ROUNDS // len(alive), close_s, nudging=number > 0)
            if trial.end_s <= close_s:
                break
        alive = sorted(alive, key=lambda trial: trial.end_s)
        alive = alive[: max(1, len(alive) // 3)]
    trials.sort(key=lambda trial: trial.end_s)
    return [_forwards(problem, trial) for trial in trials]


def group_sizes(num_devices: int) -> tuple[int, ...]:
    """Devices of the groups that MetaOps take, ascending; the first is 1."""
    if num_devices <= MOST_ONE_BY_ONE:
        return (1,)
    largest = (max(num_devices // groups, 1) for groups in NUM_GROUPS)
    return tuple(sorted({1, *(2 ** int(log2(size)) for size in largest)}))


def in_groups(problem: Problem, size: int) -> Problem:
    """The problem with allocations of whole groups alone, for MetaOps that have such."""
    return replace(problem, nodes=tuple(_in_groups(node, size) for node in problem.nodes))


def _in_groups(node: Node, size: int) -> Node:
    points = tuple(point for point in node.points if point.num_devices % size == 0)
    return replace(node, points=points or node.points)


def _grid(problem: Problem, bound: Bound, kept_per_direction: int) -> list[Trial]:
    """The best few guides of a grid, in each direction."""
    kept: list[Trial] = []
    for backwards in (False, True):
        dispatcher = Dispatcher(problem, bound, backwards=backwards)
        trials = [
            dispatcher.run(dispatcher.guide(slack, least_fit, widen=widen))
            for widen, least_fit, slack in product((True, False), LEAST_FITS, GRID_SLACK)
        ]
        trials.sort(key=lambda trial: trial.end_s)
        kept += trials[:kept_per_direction]
    return kept


def _forwards(problem: Problem, trial: Trial) -> tuple[Job, ...]:
    """The jobs of a trial, its points those of the problem."""
    grouped = trial.dispatcher.problem
    in_order = [(node, point, num_ops) for node, point, num_ops in trial.jobs.tolist()]
    jobs = turned_round(grouped, in_order) if trial.dispatcher.backwards else in_order
    places = [
        [node.points.index(point) for point in grouped_node.points]
        for node, grouped_node in zip(problem.nodes, grouped.nodes, strict=True)
    ]
    return tuple((node, places[node][point], num_ops) for node, point, num_ops in jobs)
