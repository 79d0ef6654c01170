"""What the search over everything at once estimates of a plan, beside what the account has of it."""

from __future__ import annotations

from spindle_cli.plan.problem import Problem
from spindle_cli.plan.refine.evaluate import RECOMPUTING, SLICE_COST
from spindle_cli.plan.refine.search import Search
from spindle_cli.plan.search.evaluate import EvaluatedCandidate


def estimated(problem: Problem, begun: EvaluatedCandidate) -> tuple[float, list[float]]:
    """Give the seconds of an iteration, and for each device its estimated bytes over those of the account;
    what it has in host memory is as many bytes.
    """
    under_way = Search.of(problem, begun)
    assert under_way is not None
    reserves = problem.cluster.reserve_bytes
    needed = [need.total_bytes - reserve for need, reserve in zip(begun.memory, reserves, strict=True)]
    peaks = under_way._peaks(under_way.kept)
    assert list(under_way.work.states["most_in_host"]) == [need.host_bytes for need in begun.memory]
    keeping_less = sum(piece.recompute or bool(piece.offload) for piece in begun.slices)
    added = SLICE_COST * len(begun.slices) + RECOMPUTING * keeping_less
    return under_way.costs[0] / (1 + added), list(peaks / needed)
