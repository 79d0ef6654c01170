"""Searching for a better schedule: many dispatches, each with a slightly different guide, keeping what helps.

1. a grid of guides, forwards and backwards; on large clusters also of dispatches in which MetaOps take whole
   groups of devices alone, of which there are far fewer, and hardly fewer good ones
2. from the best few, random changes of the guide as a whole: stretch, urgency, slack
3. random changes of single decisions too: other devices, fewer ops, waiting, going first
Between rounds the worse half is dropped. Deterministic: the random numbers come from a fixed seed, and the
effort is counted in dispatches, not in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import log2
from random import Random

import numpy as np

from spindle_cli.plan.bound.bound import Bound, lower_bound
from spindle_cli.plan.problem import Node, Problem
from spindle_cli.plan.search.dispatch import Dispatcher, Guide, Ints, Nudge
from spindle_cli.plan.search.draws import scaled_at_random
from spindle_cli.plan.search.listing import Job, turned_round

GRID_SLACK = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2)
GRID_LEAST_FIT = (0.0, 0.4, 1.0)
# Guides that are kept of each direction, of all groups together.
KEPT_PER_DIRECTION = 4
# Above so many devices, in groups of powers of two, into at least so many groups.
MOST_ONE_BY_ONE = 64
NUM_GROUPS = (128, 64, 32)
ROUNDS = 3
# What a dispatch costs beyond its jobs, in jobs.
EFFORT_PER_DISPATCH = 10
# How far a decision is moved along the curve; 0 only cuts the slice elsewhere.
OTHER_POINTS = (-2, -1, -1, 0, 1, 1, 2)
# The search ends when it is so close to the bound: what remains is less than the curves are known.
CLOSE_ENOUGH = 0.001


@dataclass
class _Trial:
    """A guide and what it led to."""

    dispatcher: Dispatcher
    guide: Guide
    jobs: Ints
    end_s: float


def search(problem: Problem, bound: Bound, effort: int, seed: int) -> list[tuple[Job, ...]]:
    """The schedules found, the best first.

    Args:
        effort: how long to search beyond the grid: jobs to dispatch, of all the schedules tried together.
        seed: another seed, another search.
    """
    random = Random(seed)  # noqa: S311 - reproducible, not secret
    sizes = group_sizes(problem.num_devices)
    kept = -(-KEPT_PER_DIRECTION // len(sizes))
    trials = _grid(problem, bound, kept)
    for size in sizes[1:]:
        grouped = in_groups(problem, size)
        trials += _grid(grouped, lower_bound(grouped), kept)
    alive = trials
    close_s = bound.lower_bound_s * (1 + CLOSE_ENOUGH)
    for number in range(ROUNDS):
        left, step = effort // ROUNDS, 0
        while left > 0 and alive[step % len(alive)].end_s > close_s:
            left -= _try_change(alive[step % len(alive)], random, nudging=number > 0)
            step += 1
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


def _grid(problem: Problem, bound: Bound, kept_per_direction: int) -> list[_Trial]:
    """The best few guides of a grid, in each direction."""
    ones = (1.0,) * len(problem.nodes)
    kept: list[_Trial] = []
    for backwards in (False, True):
        dispatcher = Dispatcher(problem, bound, backwards=backwards)
        trials: list[_Trial] = []
        for widen, least_fit, slack in product((True, False), GRID_LEAST_FIT, GRID_SLACK):
            guide = Guide(slack, ones, ones, widen, least_fit)
            trials.append(_Trial(dispatcher, guide, *dispatcher.run(guide)))
        trials.sort(key=lambda trial: trial.end_s)
        kept += trials[:kept_per_direction]
    return kept


def _try_change(trial: _Trial, random: Random, *, nudging: bool) -> int:
    """Change the guide at random; keep the change if the schedule does not end later. Returns the effort."""
    guide = trial.guide
    if nudging and random.random() < 0.7:
        for _ in range(random.choice((1, 1, 2, 3))):
            guide = _nudge(guide, trial.jobs, random)
    else:
        for _ in range(random.choice((1, 1, 2, 3))):
            guide = _vary(guide, random)
    jobs, end_s = trial.dispatcher.run(guide, trial.end_s)
    if end_s <= trial.end_s:
        trial.guide, trial.jobs, trial.end_s = guide, jobs, end_s
    return len(jobs) + EFFORT_PER_DISPATCH


def _vary(guide: Guide, random: Random) -> Guide:
    """Change one number of the guide."""
    kind = random.random()
    if kind < 0.5:
        return replace(guide, stretch=scaled_at_random(guide.stretch, 0.25, random))
    if kind < 0.8:
        return replace(guide, urgency=scaled_at_random(guide.urgency, 0.4, random))
    if kind < 0.95:
        return replace(guide, slack=abs(guide.slack + random.gauss(0, 0.02)))
    if kind < 0.97:
        return replace(guide, widen=not guide.widen)
    return replace(guide, least_fit=random.choice(GRID_LEAST_FIT))


def _nudge(guide: Guide, jobs: Ints, random: Random) -> Guide:
    """Change one decision of the schedule, or take back an earlier change."""
    if guide.nudges and random.random() < 0.25:
        return guide.nudged(random.choice(list(guide.nudges)), None)
    place = random.randrange(len(jobs))
    node = int(jobs[place, 0])
    key = (node, int(np.count_nonzero(jobs[:place, 0] == node)))
    kind = random.random()
    if kind < 0.6:
        share = random.choice((1.0, random.random()))
        return guide.nudged(key, Nudge(points=random.choice(OTHER_POINTS), share=share))
    if kind < 0.78:
        return guide.nudged(key, Nudge(wait=True))
    return guide.nudged(key, Nudge(urgency=random.choice((0.5, 0.8, 1.25, 2.0))))


def _forwards(problem: Problem, trial: _Trial) -> tuple[Job, ...]:
    """The jobs of a trial, its points those of the problem."""
    grouped = trial.dispatcher.problem
    in_order = [(node, point, num_ops) for node, point, num_ops in trial.jobs.tolist()]
    jobs = turned_round(grouped, in_order) if trial.dispatcher.backwards else in_order
    places = [
        [node.points.index(point) for point in own.points]
        for node, own in zip(problem.nodes, grouped.nodes, strict=True)
    ]
    return tuple((node, places[node][point], num_ops) for node, point, num_ops in jobs)
