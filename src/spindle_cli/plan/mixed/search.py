"""Searching for a better schedule over several types: many dispatches, each with a slightly different guide,
keeping what helps.

From the best of a grid of guides, random changes of one thing at a time: a node's stretch or urgency, a
type's price, the slack, the patience, how many ops a job runs. Deterministic: random numbers have a fixed
seed, and the effort is counted in jobs dispatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from spindle_cli.plan.mixed.bound import MixedBound
from spindle_cli.plan.mixed.dispatch import MixedDispatcher, MixedGuide
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.draws import scaled_at_random
from spindle_cli.plan.search.listing import Timed

GRID_SLACK = (0.0, 0.01, 0.03, 0.06, 0.12, 0.25)
GRID_PATIENCE = (1.2, 2.0, 1e9)
KEPT = 4
ROUNDS = 3
# What a dispatch costs beyond its jobs, in jobs.
EFFORT_PER_DISPATCH = 10
CLOSE_ENOUGH = 0.001


@dataclass
class _Trial:
    guide: MixedGuide
    timed: list[Timed]
    end_s: float


def search(problem: Problem, bound: MixedBound, effort: int, seed: int) -> list[tuple[Timed, ...]]:
    """The schedules found, the best first.

    Args:
        effort: how long to search beyond the grid: jobs to dispatch, of all the schedules tried together.
        seed: another seed, another search.
    """
    random = Random(seed)  # noqa: S311 - reproducible, not secret
    dispatcher = MixedDispatcher(problem, bound)
    ones = (1.0,) * len(problem.nodes)
    prices = (1.0,) * len(problem.cluster.types)
    trials = []
    for slack, patience in product(GRID_SLACK, GRID_PATIENCE):
        guide = MixedGuide(slack, patience, ones, ones, prices)
        trials.append(_Trial(guide, *dispatcher.run(guide)))
    trials = sorted(trials, key=lambda trial: trial.end_s)[:KEPT]
    alive, close_s = trials, bound.lower_bound_s * (1 + CLOSE_ENOUGH)
    for _ in range(ROUNDS):
        left, step = effort // ROUNDS, 0
        while left > 0 and alive[step % len(alive)].end_s > close_s:
            left -= _try_change(dispatcher, alive[step % len(alive)], random)
            step += 1
        alive = sorted(alive, key=lambda trial: trial.end_s)[: max(1, len(alive) // 2)]
    return [tuple(trial.timed) for trial in sorted(trials, key=lambda trial: trial.end_s)]


def _try_change(dispatcher: MixedDispatcher, trial: _Trial, random: Random) -> int:
    """Change the guide at random; keep the change if the schedule does not end later. Returns the effort."""
    guide = trial.guide
    for _ in range(random.choice((1, 1, 2, 3))):
        guide = _varied(guide, trial.timed, random)
    timed, end_s = dispatcher.run(guide, trial.end_s)
    if end_s <= trial.end_s:
        trial.guide, trial.timed, trial.end_s = guide, timed, end_s
    return len(timed) + EFFORT_PER_DISPATCH


def _varied(guide: MixedGuide, timed: Sequence[Timed], random: Random) -> MixedGuide:
    """Change one number of the guide."""
    kind = random.random()
    if kind < 0.35:
        return replace(guide, stretch=scaled_at_random(guide.stretch, 0.25, random))
    if kind < 0.55:
        return replace(guide, urgency=scaled_at_random(guide.urgency, 0.4, random))
    if kind < 0.65:
        return replace(guide, prices=scaled_at_random(guide.prices, 0.4, random))
    if kind < 0.72:
        return replace(guide, slack=abs(guide.slack + random.gauss(0, 0.02)))
    if kind < 0.75:
        return replace(guide, patience=random.choice(GRID_PATIENCE))
    place = random.randrange(len(timed))
    node = timed[place][0][0]
    key = (node, sum(job[0] == node for job, _, _ in timed[:place]))
    shares = {other: share for other, share in guide.shares.items() if other != key}
    return replace(guide, shares=shares if key in guide.shares else shares | {key: random.random()})
