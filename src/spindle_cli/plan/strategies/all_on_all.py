"""Data parallelism: one MetaOp after another, all of them on all devices.

A MetaOp that is through as early on fewer devices has no allocation on more in a problem; but what runs on
the devices of what it takes from hands nothing on. Behind slow links that is faster.
"""

from __future__ import annotations

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, evaluate
from spindle_cli.plan.strategies.baselines import sequential
from spindle_cli.profile.types import Profile

# Tried where what is handed on makes the best other plan longer by this share of it.
HANDING_ON_MATTERS = 0.02


def all_on_all(profile: Profile, cluster: Cluster) -> tuple[EvaluatedCandidate, Problem] | None:
    """The plan, with the problem that it is one of; None where a MetaOp does not run on all devices, each
    with samples of its own, or memory is short.
    """
    metaops = [
        metaop.model_copy(update={"curve": (point,)})
        for metaop in profile.metaops
        for point in metaop.curve
        if point.num_devices == cluster.num_devices and point.tp == 1
    ]
    if len(metaops) < len(profile.metaops):
        return None
    problem = make_problem(profile.with_metaops(metaops), cluster)
    evaluated = evaluate(problem, sequential(problem))
    return None if evaluated is None else (evaluated, problem)


def hands_on_much(best: EvaluatedCandidate) -> bool:
    """Whether a plan's messages make it so much longer that it is worth a try."""
    return best.prediction.transfer_s >= HANDING_ON_MATTERS * best.prediction.iteration_s
