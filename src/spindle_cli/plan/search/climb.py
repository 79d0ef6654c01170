"""Changing a dispatch's guide at random as long as its schedule ends no later, in a compiled loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import exp, inf
from typing import Any

import numpy as np

from spindle_cli.plan.bound.bound import Bound
from spindle_cli.plan.compiled import compiled, compiled_and_kept
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search import dispatch, draws
from spindle_cli.plan.search.dispatch import (
    LEAST_FIT,
    POINTS,
    SHARE,
    SLACK,
    URGENCY,
    WAIT,
    WIDEN,
    Guide,
    Ints,
    Nodes,
    State,
    guide_for,
    nodes_of,
    state_for,
)
from spindle_cli.plan.search.draws import draw, normal, share

# What a dispatch costs beyond its jobs, in jobs.
EFFORT_PER_DISPATCH = 10
# Values that a guide's least fit takes.
LEAST_FITS = (0.0, 0.4, 1.0)
# How many changes are made at once, how far a decision is moved along the curve (0 only cuts the slice
# elsewhere), and what it multiplies its urgency by: one as likely as another.
_CHANGES = (1, 1, 2, 3)
_OTHER_POINTS = (-2, -1, -1, 0, 1, 1, 2)
_OTHER_URGENCY = (0.5, 0.8, 1.25, 2.0)
# Spread of the logarithm of what stretch and urgency are multiplied by, and of what is added to the slack.
_STRETCHES, _URGENCIES, _SLACKENS = 0.25, 0.4, 0.02


@dataclass
class Trial:
    """A guide and what it leads to.

    Attributes:
        jobs: node, point and ops of each ([J, 3]), in order of start.
        end_s: when the last one ends, with the seconds that messages and sums take of devices on average.
    """

    dispatcher: Dispatcher
    guide: Guide
    jobs: Ints
    end_s: float

    def climb(self, random: Ints, effort: int, close_s: float, *, nudging: bool) -> None:
        """Change the guide and keep what ends no later, until so many jobs have been dispatched, or the
        schedule ends within `close_s`.

        Args:
            random: the state of the generator (`draws.py`).
            nudging: whether single decisions are changed too.
        """
        self.jobs, self.end_s = self.dispatcher.climb(self.guide, random, effort, close_s, nudging=nudging)


class Dispatcher:
    """Dispatches one problem, forwards or (`backwards`) from its end to its start.

    A backwards dispatch runs on the graph with its edges turned round; its jobs come out in the order of time
    reversed, so that the ragged ends of the schedule lie at its start.
    """

    def __init__(self, problem: Problem, bound: Bound, *, backwards: bool = False) -> None:
        self.problem = problem
        self.backwards = backwards
        self.lower_bound_s = bound.lower_bound_s
        self._nodes = nodes_of(problem, bound, backwards=backwards)
        self._state = state_for(self._nodes)
        self._tried = self.guide(0.0)
        self._jobs = np.zeros_like(self._state.jobs)

    def guide(self, slack: float, least_fit: float = 0.0, *, widen: bool = True) -> Guide:
        """A guide of this problem without nudges."""
        return guide_for(self._nodes, slack, least_fit, widen=widen)

    def run(self, guide: Guide) -> Trial:
        """What a guide leads to."""
        return Trial(self, guide, *self.climb(guide, draws.state_of(0), 0, 0.0, nudging=False))

    def climb(
        self, guide: Guide, random: Ints, effort: int, close_s: float, *, nudging: bool
    ) -> tuple[Ints, float]:
        """Change a guide as `Trial.climb` does; its jobs and `end_s`, as `Trial` has them."""
        num_jobs, end_s = _compiled_climb()(
            self._nodes,
            guide,
            self._tried,
            self._state,
            self._jobs,
            random,
            self.problem.num_devices,
            self.lower_bound_s,
            effort,
            close_s,
            nudging,
        )
        return self._jobs[:num_jobs].copy(), end_s


@cache
def _compiled_climb() -> Any:
    """The loop over dispatches, compiled."""

    def climb(
        nodes: Nodes,
        guide: Guide,
        tried: Guide,
        state: State,
        jobs: Ints,
        random: Ints,
        num_devices: int,
        bound_s: float,
        effort: int,
        close_s: float,
        nudging: bool,
    ) -> tuple[int, float]:
        """Change the guide and set the jobs that it leads to; how many, and `end_s` as `Trial` has it."""
        num_jobs, end_s = dispatch.dispatch(nodes, guide, state, num_devices, bound_s, inf)
        _copy_jobs(state.jobs, jobs, num_jobs)
        spent = 0
        while spent < effort and end_s > close_s:
            _copy_guide(guide, tried)
            nudges = nudging and share(random) < 0.7
            for _ in range(_CHANGES[draw(random, len(_CHANGES))]):
                if nudges:
                    _nudge(tried, jobs, num_jobs, random)
                else:
                    _vary(tried, random)
            number, then_s = dispatch.dispatch(nodes, tried, state, num_devices, bound_s, end_s)
            spent += number + EFFORT_PER_DISPATCH
            if then_s <= end_s:
                _copy_guide(tried, guide)
                _copy_jobs(state.jobs, jobs, number)
                num_jobs, end_s = number, then_s
        return num_jobs, end_s

    return compiled_and_kept(climb, [dispatch, draws])


@compiled
def _copy_jobs(source: Ints, to: Ints, num_jobs: int) -> None:
    for job in range(num_jobs):
        for column in range(3):
            to[job, column] = source[job, column]


@compiled
def _copy_guide(source: Guide, to: Guide) -> None:
    for place in range(len(source.numbers)):
        to.numbers[place] = source.numbers[place]
    for node in range(len(source.stretch)):
        to.stretch[node], to.urgency[node] = source.stretch[node], source.urgency[node]
    to.num_nudges[0] = source.num_nudges[0]
    for number in range(source.num_nudges[0]):
        for column in range(2):
            to.nudged[number, column] = source.nudged[number, column]
        for column in range(4):
            to.nudges[number, column] = source.nudges[number, column]


@compiled
def _vary(guide: Guide, random: Ints) -> None:
    """Change one number of the guide."""
    kind = share(random)
    if kind < 0.5:
        guide.stretch[draw(random, len(guide.stretch))] *= exp(_STRETCHES * normal(random))
    elif kind < 0.8:
        guide.urgency[draw(random, len(guide.urgency))] *= exp(_URGENCIES * normal(random))
    elif kind < 0.95:
        guide.numbers[SLACK] = abs(guide.numbers[SLACK] + _SLACKENS * normal(random))
    elif kind < 0.97:
        guide.numbers[WIDEN] = 1.0 - guide.numbers[WIDEN]
    else:
        guide.numbers[LEAST_FIT] = LEAST_FITS[draw(random, len(LEAST_FITS))]


@compiled
def _nudge(guide: Guide, jobs: Ints, num_jobs: int, random: Ints) -> None:
    """Change one decision of the schedule, or take back an earlier change."""
    count = guide.num_nudges[0]
    if count and share(random) < 0.25:
        _replace_nudge(guide, draw(random, count), count - 1)
        guide.num_nudges[0] = count - 1
        return
    job = draw(random, num_jobs)
    node, before = jobs[job, 0], 0
    for earlier in range(job):
        before += jobs[earlier, 0] == node
    place = 0
    while place < count and (guide.nudged[place, 0] != node or guide.nudged[place, 1] != before):
        place += 1
    guide.num_nudges[0] = max(count, place + 1)
    guide.nudged[place, 0], guide.nudged[place, 1] = node, before
    nudge = guide.nudges[place]
    nudge[POINTS], nudge[SHARE], nudge[WAIT], nudge[URGENCY] = inf, 1.0, 0.0, 1.0
    kind = share(random)
    if kind < 0.6:
        nudge[POINTS] = _OTHER_POINTS[draw(random, len(_OTHER_POINTS))]
        if draw(random, 2):
            nudge[SHARE] = share(random)
    elif kind < 0.78:
        nudge[WAIT] = 1.0
    else:
        nudge[URGENCY] = _OTHER_URGENCY[draw(random, len(_OTHER_URGENCY))]


@compiled
def _replace_nudge(guide: Guide, place: int, source: int) -> None:
    """Write one nudge over another."""
    for column in range(2):
        guide.nudged[place, column] = guide.nudged[source, column]
    for column in range(4):
        guide.nudges[place, column] = guide.nudges[source, column]
