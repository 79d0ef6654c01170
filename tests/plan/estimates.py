"""What the search over everything at once estimates of a plan, beside what the account has of it."""

from __future__ import annotations

from spindle_cli.plan.problem import Problem
from spindle_cli.plan.refine.evaluate import PIECE
from spindle_cli.plan.refine.search import Search
from spindle_cli.plan.search.judge import Judged


def estimated(problem: Problem, begun: Judged) -> tuple[float, list[float]]:
    """Give the seconds of an iteration, and for each device its estimated bytes over those of the account."""
    under_way = Search.of(problem, begun)
    assert under_way is not None
    reserves = problem.cluster.reserve_bytes
    needed = [need.total_bytes - reserve for need, reserve in zip(begun.memory, reserves, strict=True)]
    peaks = under_way._peaks(under_way.kept)
    return under_way.costs[0] / (1 + PIECE * len(begun.slices)), list(peaks / needed)
