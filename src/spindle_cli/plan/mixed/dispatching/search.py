"""Searching for a better schedule over several types: many dispatches, each with a slightly different guide,
keeping what helps.

Schedules of two kinds are searched for: plain ones, in which a MetaOp keeps to an allocation as long as that
is fast enough, and such as mix two allocations, or follow the linear program's optimum. The latter compute
for less long, the former have fewer slices, and send less between them.

From the best of a grid of guides, of mixing ones also backwards, random changes of one thing at a time
(`climb.py`). Between rounds all but the best are dropped. Deterministic: random numbers have a fixed seed,
and the effort is counted in jobs dispatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, product

from spindle_cli.plan.mixed.bound import MixedBound
from spindle_cli.plan.mixed.dispatching.climb import GRID_PATIENCE, MixedDispatcher, Trial
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search import draws
from spindle_cli.plan.search.improve import CLOSE_ENOUGH, KEPT_PER_DIRECTION
from spindle_cli.plan.search.listing import Timed

GRID_SLACK = (0.0, 0.01, 0.03, 0.06, 0.12, 0.25)
# Where nothing is searched beyond the grid, many problems are asked for quickly.
QUICK_PATIENCE = (2.0,)
# So many schedules are worth placing.
MOST_RETURNED = 4
# How many go on behind each round.
STILL_ALIVE = (2, 1, 1)


def search(
    problem: Problem, bound: MixedBound, effort: int, seed: int, *, mixes: bool
) -> list[tuple[Timed, ...]]:
    """The best schedules found of a kind, the best first.

    Args:
        effort: how long to search beyond the grid: jobs to dispatch, of all the schedules tried together.
        seed: another seed, another search.
        mixes: whether MetaOps may mix allocations, and follow the program's optimum.
    """
    random = draws.state_of(seed)
    patience = GRID_PATIENCE if effort or not mixes else QUICK_PATIENCE
    trials = [
        trial
        for backwards in ((False, True) if mixes else (False,))
        for trial in _grid(MixedDispatcher(problem, bound, backwards=backwards), patience, mixes=mixes)
    ]
    alive, close_s = trials, bound.lower_bound_s * (1 + CLOSE_ENOUGH)
    for number in STILL_ALIVE:
        for trial in alive if effort else ():
            trial.climb(random, effort // len(STILL_ALIVE) // len(alive), close_s)
            if trial.end_s <= close_s:
                break
        alive = sorted(alive, key=_end_s)[:number]
    return [trial.forwards() for trial in sorted(trials, key=_end_s)[:MOST_RETURNED]]


def _grid(dispatcher: MixedDispatcher, patience: Sequence[float], *, mixes: bool) -> list[Trial]:
    """The best few guides of a grid; of mixing ones whose schedules end at the same time one."""
    trials = []
    for follows_optimum, slack, most in product((False, True) if mixes else (False,), GRID_SLACK, patience):
        guide = dispatcher.guide(slack, most, mixes=mixes, follows_optimum=follows_optimum)
        trials.append(Trial(dispatcher, guide, *dispatcher.run(guide)))
    trials.sort(key=_end_s)
    if mixes:
        trials = [next(alike) for _, alike in groupby(trials, key=_end_s)]
    return trials[:KEPT_PER_DIRECTION]


def _end_s(trial: Trial) -> float:
    return trial.end_s
