"""The best plan of a workload whose steps run all tasks: of whole batches, or of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import ShardingOf
from spindle_cli.plan.best.any_number import on_any_number
from spindle_cli.plan.best.experts import has_experts, with_experts
from spindle_cli.plan.best.in_memory import in_memory, searched_over_everything
from spindle_cli.plan.best.micro_batches import MicroBatched
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.best.rounds import in_rounds
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.cutting.on_all import on_all_devices
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, evaluate
from spindle_cli.plan.search.memory_fallback import describe
from spindle_cli.plan.search.passes_apart import apart, or_another_apart, told_apart, with_passes_apart
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.strategies.baselines import sequential
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import Profile

# Shares that are not equal are tried where the lower bound with them is lower by at least this.
WORTH_UNEQUAL = 0.02
# Micro-batches of all MetaOps that are asked for and searched over at once; for a chain in 64 that takes four
# times as long as all else and finds nothing.
MOST_SEARCHED_TOGETHER = 32
# All MetaOps on all devices are tried where what is handed on makes the best other plan longer by this share.
HANDING_ON_MATTERS = 0.02


class BelowBoundError(Exception):
    """A schedule that is shorter than the lower bound."""


def require_above(lower_bound_s: float, end_s: float, strategy: str) -> None:
    """Stop where a schedule ends before the bound that no schedule can end before: one of both is wrong.

    Without tolerance: the bound is lowered by what floats can be off, and durations are rounded up.

    Raises:
        BelowBoundError: this is a bug of ours.
    """
    if end_s < lower_bound_s:
        raise BelowBoundError(
            f"the schedule of {strategy} ends at {end_s:.9g} s, before the lower bound of "
            f"every schedule, {lower_bound_s:.9g} s"
        )


@dataclass(frozen=True)
class PlanResult:
    """The best plan of some tasks.

    Attributes:
        is_short: memory stood in the way of a faster one.
        note: what it says of that.
        cut: whose slices it has, where tasks are cut into micro-batches.
        sharding: what devices share out.
        is_searched: a search over everything at once has come near to what is possible, or made it much
            shorter without recomputing much: there is nothing to give up for memory.
    """

    best: EvaluatedCandidate
    is_short: bool
    note: str | None = None
    cut: MicroBatched | None = None
    sharding: ShardingOf = field(default_factory=dict)
    is_searched: bool = False


def find(
    profile: Profile, cluster: Cluster, strategy: StrategyName, effort: int, posing: ProblemPoser
) -> PlanResult | None:
    """The best plan by a profile, its passes in the best order; None if nothing fits, or what does is not
    faster than another kind of plan.

    Raises:
        NoPlanError: a MetaOp has no valid allocation, or the strategy no plan on these types.
        BelowBoundError: a bug of the planner.
    """
    profile = on_all_devices(profile, cluster)
    posed_problem = posing.posed(profile, cluster)
    whole = problem = posed_problem.problem
    begins, all_fit = posed_problem.best_of_each(strategy, effort)

    in_short_memory = in_memory(
        problem, posed_problem.lower_bound_s, begins, strategy, effort, all_fit=all_fit
    )
    best, note, is_searched = None, None, False
    if in_short_memory is not None:
        best, note, is_searched = in_short_memory.best, in_short_memory.note, in_short_memory.is_searched
    if strategy == "spindle" and has_experts(profile) and not cluster.is_mixed:
        shared_out = with_experts(profile, cluster, effort, best)
        if shared_out is not None:
            best, problem, note = shared_out
    if best is None:
        return None
    if strategy in ("sequential", "spindle") and not cluster.is_mixed and hands_on_much(best):
        alike = all_on_all(profile, cluster)
        if alike is not None and alike[0].rank() < best.rank():
            (best, problem), note = alike, None
    require_above(posed_problem.lower_bound_s, best.prediction.compute_s, best.strategy)
    best = with_passes_apart(problem, best)
    if strategy == "spindle" and not cluster.is_mixed:
        baselines = map(posed_problem.by_baseline, posed_problem.baselines(strategy))
        if (reordered := or_another_apart(whole, best, baselines)) is not best:
            best, problem, note = reordered, whole, None
    if (profile.sharding or cluster.is_mixed) and not best.is_apart:
        timed_apart = apart(problem, best)
        if timed_apart is None:
            return None
        best = timed_apart
    return PlanResult(best, not all_fit, note, sharding=profile.sharding, is_searched=is_searched)


def all_on_all(profile: Profile, cluster: Cluster) -> tuple[EvaluatedCandidate, Problem] | None:
    """The plan of data parallelism, one MetaOp after another, all of them on all devices, with the problem
    that it is one of; None where a MetaOp does not run on all devices, each with samples of its own, or
    memory is short.

    A MetaOp that is through as early on fewer devices has no allocation on more in a problem; but what runs
    on the devices of what it takes from hands nothing on. Behind slow links that is faster.
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


def widened(profile: Profile, cluster: Cluster) -> Profile:
    """A profile whose curves have shares that are not equal, where the lower bound says that these gain; or
    itself.

    Raises:
        NoPlanError: a MetaOp has no valid allocation.
    """
    wide = on_any_number(profile, cluster)
    if wide is None:
        return profile
    bound_s, wide_s = (lower_bound(make_problem(either, cluster)).lower_bound_s for either in (profile, wide))
    return wide if wide_s < (1 - WORTH_UNEQUAL) * bound_s else profile


def find_wide(
    profile: Profile,
    wide: Profile,
    cluster: Cluster,
    strategy: StrategyName,
    effort: int,
    posing: ProblemPoser,
) -> PlanResult | None:
    """The best plan, also of shares that are not equal; none is slower than a quick plan of equal shares.
    None as `find` says.

    Args:
        wide: the profile, as `widened` has it.

    Raises:
        NoPlanError: a MetaOp has no valid allocation.
        BelowBoundError: a bug of the planner.
    """
    result = find(wide, cluster, strategy, effort, posing)
    if wide is profile:
        return result
    apart = None if result is None else told_apart(make_problem(wide, cluster), result.best)
    equal = find(profile, cluster, strategy, NO_SEARCH, posing)
    if result is None or apart is None:
        return equal if effort == NO_SEARCH else find(profile, cluster, strategy, effort, posing)
    if equal is not None and equal.best.rank() <= apart.rank():
        return equal
    return replace(result, best=apart)


def find_in(
    cut: MicroBatched,
    search: Callable[[Profile], PlanResult | None],
    quick: Sequence[EvaluatedCandidate],
    effort: int,
) -> PlanResult | None:
    """The best plan with micro-batches that are asked for: of one of each task, round after round, and what a
    search over all of them makes of it; None if nothing fits.

    Args:
        search: plans one micro-batch of each task.
        quick: plans of these by a quick search and by what searches nothing: they may take longer, and less
            in all rounds.
        effort: of the search over all micro-batches; NO_SEARCH: there is none.
    """
    one = search(cut.one)
    if one is None or not cut.counts:
        return one
    plans = [one.best] if one.note is not None else [one.best, *quick]
    rounds = (in_rounds(cut, plan) for plan in plans)
    begins = sorted((plan for plan in rounds if plan is not None), key=EvaluatedCandidate.rank)
    if not begins:
        return None
    best, note = begins[0], one.note
    if effort != NO_SEARCH and len(cut.all.nodes) <= MOST_SEARCHED_TOGETHER:
        searched = searched_over_everything(cut.all, begins, effort)
        if searched is not None:
            best, note = searched, describe(searched.slices)
    return PlanResult(best, one.is_short, note, cut, one.sharding)
