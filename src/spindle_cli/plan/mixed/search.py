"""Searching for a better schedule over several types: many dispatches, each with a slightly different guide,
keeping what helps.

Schedules of two kinds are searched for: plain ones, in which a MetaOp keeps to an allocation as long as that
is fast enough, and such as mix two allocations, or follow the linear program's optimum. The latter compute
for less long, the former have fewer slices, and send less between them.

From the best of a grid of guides, of mixing ones also backwards, random changes of one thing at a time: a
node's stretch or urgency, a type's price, the slack, the patience, whether the program's own allocations are
taken, how many ops a job runs. Between rounds all but the best are dropped. Deterministic: random numbers
have a fixed seed, and the effort is counted in jobs dispatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import exp
from random import Random

from spindle_cli.plan.bound.bound import Bound
from spindle_cli.plan.mixed.dispatch import MixedDispatcher, MixedGuide
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.climb import EFFORT_PER_DISPATCH
from spindle_cli.plan.search.improve import CLOSE_ENOUGH, KEPT_PER_DIRECTION
from spindle_cli.plan.search.listing import Timed

GRID_SLACK = (0.0, 0.01, 0.03, 0.06, 0.12, 0.25)
GRID_PATIENCE = (1.2, 2.0, 1e9)
# Where nothing is searched beyond the grid, many problems are asked for quickly.
QUICK_PATIENCE = (2.0,)
# So many schedules are worth placing.
MOST_RETURNED = 4
# How many go on behind each round.
STILL_ALIVE = (2, 1, 1)


@dataclass
class _Trial:
    """A guide and what it led to, in the time of its dispatcher."""

    dispatcher: MixedDispatcher
    guide: MixedGuide
    timed: list[Timed]
    end_s: float

    def forwards(self) -> tuple[Timed, ...]:
        if not self.dispatcher.backwards:
            return tuple(self.timed)
        turned = ((job, self.end_s - end_s, self.end_s - start_s) for job, start_s, end_s in self.timed)
        return tuple(sorted(turned, key=lambda timed: timed[1]))


def search(problem: Problem, bound: Bound, effort: int, seed: int, *, mixes: bool) -> list[tuple[Timed, ...]]:
    """The best schedules found of a kind, the best first.

    Args:
        effort: how long to search beyond the grid: jobs to dispatch, of all the schedules tried together.
        seed: another seed, another search.
        mixes: whether MetaOps may mix allocations, and follow the program's optimum.
    """
    random = Random(seed)  # noqa: S311 - reproducible, not secret
    patience = GRID_PATIENCE if effort or not mixes else QUICK_PATIENCE
    trials = [
        trial
        for backwards in ((False, True) if mixes else (False,))
        for trial in _grid(MixedDispatcher(problem, bound, backwards=backwards), patience, mixes=mixes)
    ]
    alive, close_s = trials, bound.lower_bound_s * (1 + CLOSE_ENOUGH)
    for number in STILL_ALIVE:
        left, step = effort // len(STILL_ALIVE), 0
        while left > 0 and alive[step % len(alive)].end_s > close_s:
            left -= _try_change(alive[step % len(alive)], random)
            step += 1
        alive = sorted(alive, key=_end_s)[:number]
    return [trial.forwards() for trial in sorted(trials, key=_end_s)[:MOST_RETURNED]]


def _grid(dispatcher: MixedDispatcher, patience: Sequence[float], *, mixes: bool) -> list[_Trial]:
    """The best few guides of a grid; of mixing ones whose schedules end at the same time one."""
    ones = (1.0,) * len(dispatcher.problem.nodes)
    prices = (1.0,) * len(dispatcher.devices)
    trials = []
    for follows_optimum, slack, most in product((False, True) if mixes else (False,), GRID_SLACK, patience):
        guide = MixedGuide(slack, most, ones, ones, prices, mixes, follows_optimum)
        trials.append(_Trial(dispatcher, guide, *dispatcher.run(guide)))
    trials.sort(key=_end_s)
    if mixes:
        trials = [next(alike) for _, alike in groupby(trials, key=_end_s)]
    return trials[:KEPT_PER_DIRECTION]


def _end_s(trial: _Trial) -> float:
    return trial.end_s


def _try_change(trial: _Trial, random: Random) -> int:
    """Change the guide at random; keep the change if the schedule does not end later. Returns the effort."""
    guide = trial.guide
    for _ in range(random.choice((1, 1, 2, 3))):
        guide = _varied(guide, trial.timed, random)
    timed, end_s = trial.dispatcher.run(guide, trial.end_s)
    if end_s <= trial.end_s:
        trial.guide, trial.timed, trial.end_s = guide, timed, end_s
    return len(timed) + EFFORT_PER_DISPATCH


def _varied(guide: MixedGuide, timed: Sequence[Timed], random: Random) -> MixedGuide:
    """Change one number of the guide."""
    kind = random.random()
    if kind < 0.35:
        return replace(guide, stretch=_scaled(guide.stretch, 0.25, random))
    if kind < 0.55:
        return replace(guide, urgency=_scaled(guide.urgency, 0.4, random))
    if kind < 0.65:
        return replace(guide, prices=_scaled(guide.prices, 0.4, random))
    if kind < 0.72:
        return replace(guide, slack=abs(guide.slack + random.gauss(0, 0.02)))
    if kind < 0.75:
        if guide.mixes and random.random() < 1 / 3:
            return replace(guide, follows_optimum=not guide.follows_optimum)
        return replace(guide, patience=random.choice(GRID_PATIENCE))
    place = random.randrange(len(timed))
    node = timed[place][0][0]
    key = (node, sum(job[0] == node for job, _, _ in timed[:place]))
    shares = {task: share for task, share in guide.shares.items() if task != key}
    return replace(guide, shares=shares if key in guide.shares else shares | {key: random.random()})


def _scaled(values: Sequence[float], spread: float, random: Random) -> tuple[float, ...]:
    """One of the values multiplied by a log-normal factor."""
    place = random.randrange(len(values))
    return (*values[:place], values[place] * exp(random.gauss(0, spread)), *values[place + 1 :])
