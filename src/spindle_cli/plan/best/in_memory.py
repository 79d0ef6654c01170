"""The best plan of whole batches inside of every device's memory, on devices of one type or several: what has
been placed with nothing given up, what a search over everything at once makes of it, and where memory is
short and the search does not make up for it, what gives up speed first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from spindle_cli.costs.beyond_curve import forwards_again
from spindle_cli.costs.shares import times_of
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.evaluate import EvaluatedCandidate
from spindle_cli.plan.search.memory_fallback import describe
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.types import Slice, StrategyName
from spindle_cli.profile.types import MetaOpProfile

# Of a schedule that takes no more than this many times as long as no schedule can be shorter than, nothing is
# searched for further; and a search that makes a plan shorter than this share of it has found what there is
# without giving up speed for memory, if it recomputes no more than this share of all forward passes.
NEAR_BOUND = 1.03
SEARCHED = 0.95
RECOMPUTES_LITTLE = 0.1
# What such a search leads to that takes no more than this many times as long as the bound is as good.
NEAR_SEARCHED = 1.08
# Where memory is ample and a schedule takes more than this many times as long as that, links decide, which
# the strategies' searches do not see.
LINKS_DECIDE = 1.2


@dataclass(frozen=True)
class InMemory:
    """The best plan of a problem.

    Attributes:
        note: what the plan says of what it gives up.
        is_searched: as `PlanResult` has it.
    """

    best: EvaluatedCandidate
    note: str | None = None
    is_searched: bool = False


def in_memory(
    problem: Problem,
    lower_bound_s: float,
    begins: Sequence[EvaluatedCandidate],
    strategy: StrategyName,
    effort: int,
    *,
    all_fit: bool,
) -> InMemory | None:
    """The best plan of a problem; None if nothing fits.

    Args:
        lower_bound_s: no schedule is shorter.
        begins: plans with nothing given up that fit, the best first.
        all_fit: whether memory stood in the way of none of the begins.
    """
    may_search = strategy == "spindle" and effort != NO_SEARCH
    shortest_s = min((evaluated.prediction.iteration_s for evaluated in begins), default=inf)
    result = InMemory(begins[0]) if begins else None
    if result is not None and may_search:
        is_far = leaves_much(shortest_s, lower_bound_s, all_fit=all_fit)
        searched = searched_over_everything(problem, begins, effort) if is_far else None
        is_near = searched is not None and (
            searched.prediction.compute_s <= NEAR_SEARCHED * lower_bound_s
            or _gives_up_little(problem, searched, result.best)
        )
        best = searched or result.best
        result = InMemory(best, describe(best.slices), is_near)
    return result


def leaves_much(iteration_s: float, lower_bound_s: float, *, all_fit: bool) -> bool:
    """Whether the shortest plan that fits leaves much to a search over everything at once.

    Args:
        lower_bound_s: no schedule is shorter.
        all_fit: whether memory stood in no plan's way.
    """
    return iteration_s > lower_bound_s * (LINKS_DECIDE if all_fit else NEAR_BOUND)


def searched_over_everything(
    problem: Problem, begins: Sequence[EvaluatedCandidate], effort: int
) -> EvaluatedCandidate | None:
    """A shorter plan than those that fit, found by the search over everything at once; None where there is
    none. Loading what compiles it takes a while, so it is loaded where it is needed.
    """
    from spindle_cli.plan.refine.search import refined

    shorter = refined(problem, begins, effort)
    return shorter and replace(shorter, strategy="spindle")


def _gives_up_little(problem: Problem, searched: EvaluatedCandidate, before: EvaluatedCandidate) -> bool:
    """Whether a search has made a plan much shorter, and recomputes little."""
    is_shorter = searched.prediction.iteration_s <= SEARCHED * before.prediction.iteration_s
    share = recomputed_share(searched.slices, problem.profile.by_name, problem.cluster)
    return is_shorter and share <= RECOMPUTES_LITTLE


def recomputed_share(
    slices: Iterable[Slice], by_name: Mapping[str, MetaOpProfile], cluster: Cluster
) -> float:
    """The part of all forward passes' device-seconds that backward passes compute again."""
    again_s = total_s = 0.0
    for slice_ in slices:
        op = times_of(by_name[slice_.metaop], slice_, cluster)
        assert op is not None, "no other shares are planned"
        op_s = len(slice_.devices) * op.forward_s
        total_s += op_s * slice_.num_ops
        again_s += op_s * forwards_again(slice_, by_name[slice_.metaop])
    return again_s / total_s if total_s else 0.0
