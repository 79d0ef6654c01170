"""`spindle`: every MetaOp on as many devices as serve the whole iteration, without waves waiting for each
other.

Schedules come from searching (improve.py); the baselines are among the candidates, so that the plan is never
worse.
"""

from __future__ import annotations

from collections.abc import Iterator

from spindle_cli.plan.bound.bound import Bound
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Candidate
from spindle_cli.plan.search.improve import search
from spindle_cli.plan.search.listing import time_jobs, to_pieces
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.strategies.baselines import optimus, sequential

# Jobs that the shortest search dispatches.
SHORTEST = 400_000
# Of the shortest search only so many schedules are candidates: longer ones find such that end sooner.
OF_SHORTEST = 4


def spindle(problem: Problem, bound: Bound, effort: int) -> Iterator[list[Candidate]]:
    """Candidates with the devices left to the placement: two of the baselines' schedules, then those of each
    search.

    There is one search for each level of effort and one before, each four times as long as the one before.
    More effort adds searches and leaves the others as they are, so that it never makes a plan worse.
    """
    yield [Candidate("spindle", baseline.pieces) for baseline in (sequential(problem), optimus(problem))]
    num_levels = 0 if effort == NO_SEARCH else effort + 2
    efforts = [SHORTEST * 4**level for level in range(num_levels)]
    for level, jobs_tried in enumerate(efforts or [0]):
        schedules = search(problem, bound, jobs_tried, seed=level)
        if jobs_tried and not level:
            schedules = schedules[:OF_SHORTEST]
        yield [Candidate("spindle", to_pieces(problem, time_jobs(problem, jobs))) for jobs in schedules]
