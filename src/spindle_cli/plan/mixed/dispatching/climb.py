"""Changing a dispatch's guide at random as long as its schedule ends no later, over several types, in a
compiled loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import exp, inf
from typing import Any

from spindle_cli.plan.compiled import compiled, compiled_and_kept
from spindle_cli.plan.mixed.bound import MixedBound
from spindle_cli.plan.mixed.dispatching import dispatch
from spindle_cli.plan.mixed.dispatching.dispatch import (
    FOLLOWS,
    MIXES,
    PATIENCE,
    SLACK,
    WIDEN,
    MixedGuide,
    MixedNodes,
    MixedState,
    guide_for,
    nodes_of,
    prices_of,
    state_for,
)
from spindle_cli.plan.mixed.dispatching.optimum import optimum_ops
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search import draws
from spindle_cli.plan.search.climb import EFFORT_PER_DISPATCH
from spindle_cli.plan.search.dispatch import Floats, Ints
from spindle_cli.plan.search.draws import draw, normal, share
from spindle_cli.plan.search.listing import Timed

GRID_PATIENCE = (1.2, 2.0, 1e9)
# How many changes are made at once, one number as likely as another.
_CHANGES = (1, 1, 2, 3)
# Spread of the logarithm of what stretch, and urgency and prices, are multiplied by, and of what is added to
# the slack.
_STRETCHES, _OTHERS, _SLACKENS = 0.25, 0.4, 0.02


@dataclass
class Trial:
    """A guide and what it led to, in the time of its dispatcher."""

    dispatcher: MixedDispatcher
    guide: MixedGuide
    timed: list[Timed]
    end_s: float

    def climb(self, random: Ints, effort: int, close_s: float) -> None:
        """Change the guide and keep what ends no later, until so many jobs have been dispatched, or the
        schedule ends within `close_s`.

        Args:
            random: the state of the generator (`draws.py`).
        """
        self.timed, self.end_s = self.dispatcher.climb(self.guide, random, effort, close_s)

    def forwards(self) -> tuple[Timed, ...]:
        """The jobs in the time of the problem, in order of start."""
        if not self.dispatcher.backwards:
            return tuple(self.timed)
        turned = ((job, self.end_s - end_s, self.end_s - start_s) for job, start_s, end_s in self.timed)
        return tuple(sorted(turned, key=lambda timed: timed[1]))


class MixedDispatcher:
    """Dispatches one problem, forwards or (`backwards`) from its end to its start: on the graph with its
    edges turned round, and times that count from the end.

    Attributes:
        optimum: of each node, by point, how many of its ops the linear program runs there.
    """

    def __init__(self, problem: Problem, bound: MixedBound, *, backwards: bool = False) -> None:
        self.backwards = backwards
        self.optimum = [
            optimum_ops(node.points, used, prices_of(bound).tolist())
            for node, used in zip(problem.nodes, bound.optimum, strict=True)
        ]
        self._lower_bound_s = bound.lower_bound_s
        self._nodes = nodes_of(problem, bound, self.optimum, backwards=backwards)
        self._state, self._found = state_for(self._nodes), state_for(self._nodes)
        self._tried = self.guide(0.0, 1.0)

    def guide(
        self, slack: float, patience: float, *, mixes: bool = True, follows_optimum: bool = False
    ) -> MixedGuide:
        """A guide of this problem that changes nothing about single nodes, types or jobs."""
        return guide_for(self._nodes, slack, patience, mixes=mixes, follows_optimum=follows_optimum)

    def run(self, guide: MixedGuide, give_up_s: float = inf) -> tuple[list[Timed], float]:
        """The jobs in order of start, and when the last one ends; `inf` if that is after `give_up_s`."""
        return self._climbed(guide, draws.state_of(0), 0, 0.0, give_up_s)

    def climb(
        self, guide: MixedGuide, random: Ints, effort: int, close_s: float
    ) -> tuple[list[Timed], float]:
        """Change a guide as `Trial.climb` does; its jobs, and when the last one ends."""
        return self._climbed(guide, random, effort, close_s, inf)

    def _climbed(
        self, guide: MixedGuide, random: Ints, effort: int, close_s: float, give_up_s: float
    ) -> tuple[list[Timed], float]:
        jobs, times = self._found.jobs, self._found.times
        num_jobs, end_s = _compiled_climb()(
            self._nodes,
            guide,
            self._tried,
            self._state,
            jobs,
            times,
            random,
            self._lower_bound_s,
            effort,
            close_s,
            give_up_s,
        )
        listed = zip(jobs[:num_jobs].tolist(), times[:num_jobs].tolist(), strict=True)
        return [
            ((node, point, ops), start_s, end_s) for (node, point, ops), (start_s, end_s) in listed
        ], end_s


@cache
def _compiled_climb() -> Any:
    """The loop over dispatches, compiled."""

    def climb(
        nodes: MixedNodes,
        guide: MixedGuide,
        tried: MixedGuide,
        state: MixedState,
        jobs: Ints,
        times: Floats,
        random: Ints,
        bound_s: float,
        effort: int,
        close_s: float,
        give_up_s: float,
    ) -> tuple[int, float]:
        """Change the guide and set the jobs that it leads to; how many, and when the last one ends."""
        num_jobs, end_s = dispatch.dispatch(nodes, guide, state, bound_s, give_up_s)
        _copy_jobs(state, jobs, times, num_jobs)
        spent = 0
        while spent < effort and end_s > close_s:
            _copy_guide(guide, tried)
            for _ in range(_CHANGES[draw(random, len(_CHANGES))]):
                _vary(tried, jobs, num_jobs, random)
            number, then_s = dispatch.dispatch(nodes, tried, state, bound_s, end_s)
            spent += number + EFFORT_PER_DISPATCH
            if then_s <= end_s:
                _copy_guide(tried, guide)
                _copy_jobs(state, jobs, times, number)
                num_jobs, end_s = number, then_s
        return num_jobs, end_s

    return compiled_and_kept(climb, [dispatch, draws])


@compiled
def _copy_jobs(state: MixedState, jobs: Ints, times: Floats, num_jobs: int) -> None:
    for job in range(num_jobs):
        for column in range(3):
            jobs[job, column] = state.jobs[job, column]
        times[job, 0], times[job, 1] = state.times[job, 0], state.times[job, 1]


@compiled
def _copy_guide(source: MixedGuide, to: MixedGuide) -> None:
    for place in range(len(source.numbers)):
        to.numbers[place] = source.numbers[place]
    for of_type in range(len(source.prices)):
        to.prices[of_type] = source.prices[of_type]
    for node in range(len(source.stretch)):
        to.stretch[node], to.urgency[node] = source.stretch[node], source.urgency[node]
        for job in range(source.shares.shape[1]):
            to.shares[node, job] = source.shares[node, job]


@compiled
def _vary(guide: MixedGuide, jobs: Ints, num_jobs: int, random: Ints) -> None:
    """Change one number of the guide."""
    kind = share(random)
    if kind < 0.35:
        guide.stretch[draw(random, len(guide.stretch))] *= exp(_STRETCHES * normal(random))
    elif kind < 0.55:
        guide.urgency[draw(random, len(guide.urgency))] *= exp(_OTHERS * normal(random))
    elif kind < 0.65:
        guide.prices[draw(random, len(guide.prices))] *= exp(_OTHERS * normal(random))
    elif kind < 0.72:
        guide.numbers[SLACK] = abs(guide.numbers[SLACK] + _SLACKENS * normal(random))
    elif kind < 0.73 and guide.numbers[MIXES]:
        guide.numbers[FOLLOWS] = 1.0 - guide.numbers[FOLLOWS]
    elif kind < 0.74:
        guide.numbers[WIDEN] = 1.0 - guide.numbers[WIDEN]
    elif kind < 0.76:
        guide.numbers[PATIENCE] = GRID_PATIENCE[draw(random, len(GRID_PATIENCE))]
    else:
        _share_otherwise(guide, jobs, num_jobs, random)


@compiled
def _share_otherwise(guide: MixedGuide, jobs: Ints, num_jobs: int, random: Ints) -> None:
    """Have a job run another part of the ops that are left, or again as many as its node needs."""
    job = draw(random, num_jobs)
    node, before = jobs[job, 0], 0
    for earlier in range(job):
        before += jobs[earlier, 0] == node
    guide.shares[node, before] = -1.0 if guide.shares[node, before] >= 0.0 else share(random)
