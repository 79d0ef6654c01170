"""Plans whose devices share out experts although memory does not ask for it: passes take longer, by what is
exchanged, but the gradients of experts are summed over fewer devices, or over none.
"""

from __future__ import annotations

from math import inf

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.candidates import best_evaluated
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import MemoryFallback, Problem
from spindle_cli.plan.search.evaluate import EvaluatedCandidate
from spindle_cli.plan.search.memory_fallback import NEAR
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.profile.types import Profile


def has_experts(profile: Profile) -> bool:
    """Whether any MetaOp has experts, which devices may share out."""
    return any(metaop.num_experts for metaop in profile.metaops)


def with_experts(
    profile: Profile, cluster: Cluster, effort: int, best: EvaluatedCandidate | None
) -> tuple[EvaluatedCandidate, Problem, str] | None:
    """A plan that is faster than `best`, all of whose MetaOps with experts share these out, with what it says
    of that; None: there is none. Of the degrees that curves have, that of the fastest quick plan is searched.
    """
    names = frozenset(metaop.name for metaop in profile.metaops if metaop.num_experts)
    quick = _quick_plans(profile, cluster, names)
    if not quick:
        return None
    least, problem = min(quick, key=lambda item: item[0].rank())
    longest_s = inf if best is None else NEAR * best.prediction.iteration_s
    if least.prediction.iteration_s > longest_s:
        return None
    searched = None
    if effort != NO_SEARCH:
        searched, _ = best_evaluated(problem, lower_bound(problem), "spindle", effort)
    fastest = min((plan for plan in (least, searched) if plan is not None), key=EvaluatedCandidate.rank)
    if best is not None and best.rank() <= fastest.rank():
        return None
    listed = ", ".join(sorted(names))
    return fastest, problem, f"Devices share out the experts of {listed}, whose gradients fewer of them sum."


def _quick_plans(
    profile: Profile, cluster: Cluster, names: frozenset[str]
) -> list[tuple[EvaluatedCandidate, Problem]]:
    """A quick plan for each degree in which some MetaOps may share out their experts, with its problem."""
    degrees = sorted(
        {point.tp for metaop in profile.metaops if metaop.name in names for point in metaop.curve} - {1}
    )
    quick: list[tuple[EvaluatedCandidate, Problem]] = []
    for degree in degrees:
        try:
            problem = make_problem(profile, cluster, MemoryFallback(degree, names))
        except NoPlanError:  # groups of this degree need larger nodes
            continue
        quick_plan, _ = best_evaluated(problem, lower_bound(problem), "spindle", NO_SEARCH)
        if quick_plan is not None:
            quick.append((quick_plan, problem))
    return quick
