"""Plans that recompute less than what their memory asks for in one stroke.

What saves most for a second is recomputed first, or every MetaOp's ops alike: each leaves some devices with
memory that nobody uses, beside others that are full. So another way starts from all that can be recomputed:
MetaOp by MetaOp, those that take longest first, all of it is kept again, or half, where that is faster; what
is saved goes to whoever has most to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf

from spindle_cli.plan.search.memory_fallback import TightPlan, TightProblem, given_up, selects
from spindle_cli.plan.strategies.spindle import NO_SEARCH
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import MetaOpProfile

# How often MetaOps are looked at: what was kept of one may leave room for another, or take it.
KEEPING_ROUNDS = 2
# Of what recomputing everything takes, what a MetaOp has to take to be recomputed, and to be kept again.
RECOMPUTED, KEPT = 0.02, 0.05


def keeping_more(tight: TightProblem, strategy: StrategyName) -> TightPlan | None:
    """The fastest quick plan that was found with the same layers split, of those that recompute all but what
    some MetaOps keep; None if none fits.
    """
    metaops = tight.problem.profile.metaops
    total_s = sum(map(_recomputed_s, metaops))
    longest = sorted(metaops, key=_recomputed_s, reverse=True)
    counts = {each.name: each.num_ops for each in longest if _recomputed_s(each) >= RECOMPUTED * total_s}
    now = _recomputing(tight, counts, {})
    best = _quick(now, strategy)
    for _ in range(KEEPING_ROUNDS):
        before = now
        for metaop in longest:
            for less in _with_less(now, metaop) if _recomputed_s(metaop) >= KEPT * total_s else ():
                tried = _quick(less, strategy)
                if _iteration_s(tried) < _iteration_s(best):
                    best, now = tried, less
                    break
        if now is before:
            break
    return best


def _with_less(tight: TightProblem, metaop: MetaOpProfile) -> Iterator[TightProblem]:
    """With none of a MetaOp's ops recomputed, with all of them but for what takes longest, and with half of
    those that are.
    """
    name, fallback = metaop.name, tight.fallback
    now = fallback.recompute.get(name, 0), fallback.selective.get(name, 0)
    for whole, selective in _less(metaop, *now, selects=selects(metaop) and name not in fallback.split):
        yield _recomputing(
            tight, {**fallback.recompute, name: whole}, {**fallback.selective, name: selective}
        )


def _less(metaop: MetaOpProfile, whole: int, selective: int, *, selects: bool) -> Iterator[tuple[int, int]]:
    """How many ops may be recomputed, whole and but for what takes longest, instead of so many.

    Args:
        selects: whether what takes longest may be kept by itself.
    """
    if whole or selective:
        yield 0, 0
    if whole and selects:
        yield 0, metaop.num_ops
    if whole > 1:
        yield whole // 2, metaop.num_ops - whole // 2 if selects else 0
    elif selective > 1:
        yield 0, selective // 2


def _recomputing(tight: TightProblem, whole: Mapping[str, int], selective: Mapping[str, int]) -> TightProblem:
    """The same with so many ops of each MetaOp recomputed. What hides is moved to host memory besides."""
    profile, cluster = tight.problem.profile, tight.problem.cluster
    fallback = replace(
        tight.fallback,
        recompute={name: count for name, count in whole.items() if count},
        selective={name: count for name, count in selective.items() if count},
        offload=given_up(profile, cluster, 1.0).offload,
    )
    return TightProblem(fallback, tight.posing.posed(profile, cluster, fallback), tight.posing)


def _quick(tight: TightProblem, strategy: StrategyName) -> TightPlan | None:
    judged, _ = tight.posed.best(strategy, NO_SEARCH)
    return None if judged is None else TightPlan(judged, tight)


def _iteration_s(plan: TightPlan | None) -> float:
    return inf if plan is None else plan.judged.prediction.iteration_s


def _recomputed_s(metaop: MetaOpProfile) -> float:
    """Seconds of all devices that recomputing all of a MetaOp's ops takes."""
    narrowest = metaop.curve[0]
    return metaop.num_ops * narrowest.num_devices * narrowest.forward_s
