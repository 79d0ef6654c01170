"""Searching for a better schedule: many dispatches, each with a slightly different guide, keeping what helps.

1. a grid of guides, forwards and backwards
2. from the best few, random changes of the guide as a whole: stretch, urgency, slack
3. random changes of single decisions too: other devices, fewer ops, waiting, going first
Between rounds the worse half is dropped. Deterministic: the random numbers come from a fixed seed, and the
effort is counted in dispatches, not in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from spindle_cli.plan.bound.bound import Bound
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.dispatch import Dispatcher, Guide, Nudge
from spindle_cli.plan.search.draws import scaled_at_random
from spindle_cli.plan.search.listing import Job, turned_round

GRID_SLACK = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2)
GRID_LEAST_FIT = (0.0, 0.4, 1.0)
KEPT_PER_DIRECTION = 4
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
    jobs: list[Job]
    end_s: float


def search(problem: Problem, bound: Bound, effort: int, seed: int) -> list[tuple[Job, ...]]:
    """The schedules found, the best first.

    Args:
        effort: how long to search beyond the grid: jobs to dispatch, of all the schedules tried together.
        seed: another seed, another search.
    """
    random = Random(seed)  # noqa: S311 - reproducible, not secret
    trials = _grid(problem, bound)
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


def _grid(problem: Problem, bound: Bound) -> list[_Trial]:
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
        kept += trials[:KEPT_PER_DIRECTION]
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


def _nudge(guide: Guide, jobs: Sequence[Job], random: Random) -> Guide:
    """Change one decision of the schedule, or take back an earlier change."""
    if guide.nudges and random.random() < 0.25:
        return guide.nudged(random.choice(list(guide.nudges)), None)
    place = random.randrange(len(jobs))
    node = jobs[place][0]
    key = (node, sum(job[0] == node for job in jobs[:place]))
    kind = random.random()
    if kind < 0.6:
        share = random.choice((1.0, random.random()))
        return guide.nudged(key, Nudge(points=random.choice(OTHER_POINTS), share=share))
    if kind < 0.78:
        return guide.nudged(key, Nudge(wait=True))
    return guide.nudged(key, Nudge(urgency=random.choice((0.5, 0.8, 1.25, 2.0))))


def _forwards(problem: Problem, trial: _Trial) -> tuple[Job, ...]:
    return tuple(turned_round(problem, trial.jobs) if trial.dispatcher.backwards else trial.jobs)
