"""The best plan of a workload whose steps run all tasks: of whole batches, or of micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from typing import Protocol

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import ShardingOf
from spindle_cli.plan.best.any_number import on_any_number, told_apart
from spindle_cli.plan.best.drafts import BASELINES, ONE_TYPE, best_of_each, by_baseline
from spindle_cli.plan.best.experts import with_experts
from spindle_cli.plan.best.in_memory import in_memory
from spindle_cli.plan.best.micro_batches import (
    MicroBatched,
    alike_micro_batches,
    in_micro_batches,
    micro_batches_for,
)
from spindle_cli.plan.best.rounds import in_rounds, rounds_of
from spindle_cli.plan.best.sharding import on_all_devices
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.problem import make_problem
from spindle_cli.plan.search.judge import Judged
from spindle_cli.plan.search.memory_fallback import (
    NEAR,
    OrLessS,
    TightPlan,
    itself,
    least_fallback,
    with_fallback,
)
from spindle_cli.plan.search.passes_apart import apart, or_another_apart, with_passes_apart
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.search.spread import all_spread_out
from spindle_cli.plan.strategies.all_on_all import all_on_all, hands_on_much
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import Profile

# By how much less is kept of a batch in micro-batches.
KEPT_LESS = (1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64)
# How many micro-batches all tasks have alike; and after how many of these in a row that gain nothing to stop.
ALIKE = (2, 3, 4, 6, 8, 12, 16)
PATIENCE = 2
# A quick plan that takes more than this many times as long as the best of another kind gains nothing.
FAR = 1.15
# Shares that are not equal are tried where the lower bound with them is lower by at least this.
WORTH_UNEQUAL = 0.02


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
class Found:
    """The best plan of some tasks.

    Attributes:
        is_short: memory stood in the way of a faster one.
        note: what it says of that.
        cut: whose slices it has, where tasks are cut into micro-batches.
        sharding: what devices share out.
        is_searched: a search over everything at once has come near to what is possible, or made it much
            shorter without recomputing much: there is nothing to give up for memory.
    """

    best: Judged
    is_short: bool
    note: str | None = None
    cut: MicroBatched | None = None
    sharding: ShardingOf = field(default_factory=dict)
    is_searched: bool = False


def find(
    profile: Profile, cluster: Cluster, strategy: StrategyName, effort: int, or_less_s: OrLessS = itself
) -> Found | None:
    """The best plan by a profile, its passes in the best order; None if nothing fits, or what does is not
    faster than another kind of plan.

    Raises:
        NoPlanError: a MetaOp has no valid allocation.
        BelowBoundError: a bug of the planner.
    """
    profile = on_all_devices(profile, cluster)
    whole = problem = make_problem(profile, cluster)
    bound = lower_bound(problem)
    by_name = cache(partial(by_baseline, problem))
    fitting, all_fit = best_of_each(problem, bound, strategy, effort, by_name)
    fitting = all_spread_out(problem, fitting)

    def give_up(_: Judged | None) -> TightPlan | None:
        return with_fallback(profile, cluster, strategy, effort, ONE_TYPE, or_less_s=or_less_s)

    found = in_memory(problem, bound.lower_bound_s, fitting, strategy, effort, give_up, all_fit=all_fit)
    best, note, is_searched = None, None, False
    if found is not None:
        best, problem, note, is_searched = found.best, found.problem, found.note, found.is_searched
    if strategy == "spindle" and any(metaop.num_experts for metaop in profile.metaops):
        shared_out = with_experts(profile, cluster, effort, best)
        if shared_out is not None:
            best, problem, note = shared_out
    if best is None:
        return None
    if strategy in ("sequential", "spindle") and hands_on_much(best):
        alike = all_on_all(profile, cluster)
        if alike is not None and alike[0].rank() < best.rank():
            (best, problem), note = alike, None
    require_above(bound.lower_bound_s, best.prediction.compute_s, best.strategy)
    best = with_passes_apart(problem, best)
    baselines = (by_name(name) for name in BASELINES if strategy == "spindle")
    if (other := or_another_apart(whole, best, baselines)) is not best:
        best, problem, note = other, whole, None
    if profile.sharding and not best.is_apart:
        timed_apart = apart(problem, best)
        if timed_apart is None:
            return None
        best = timed_apart
    return Found(best, not all_fit, note, sharding=profile.sharding, is_searched=is_searched)


def find_on_any_number(
    profile: Profile, cluster: Cluster, strategy: StrategyName, effort: int, or_less_s: OrLessS = itself
) -> Found | None:
    """The best plan, also of shares that are not equal, where the lower bound says that these gain; none is
    slower than a quick plan of equal shares. None as `find` says.

    Raises:
        NoPlanError: a MetaOp has no valid allocation.
        BelowBoundError: a bug of the planner.
    """
    wide = on_any_number(profile, cluster)
    if wide is None or not _gains(profile, wide, cluster):
        return find(profile, cluster, strategy, effort, or_less_s)
    found = find(wide, cluster, strategy, effort, or_less_s)
    apart = None if found is None else told_apart(make_problem(wide, cluster), found.best)
    equal = find(profile, cluster, strategy, NO_SEARCH, or_less_s)
    if found is None or apart is None:
        return equal if effort == NO_SEARCH else find(profile, cluster, strategy, effort, or_less_s)
    if equal is not None and equal.best.rank() <= apart.rank():
        return equal
    return replace(found, best=apart)


def _gains(profile: Profile, wide: Profile, cluster: Cluster) -> bool:
    """Whether the bound of schedules is lower by what is worth a search."""
    bound_s, wide_s = (lower_bound(make_problem(each, cluster)).lower_bound_s for each in (profile, wide))
    return wide_s < (1 - WORTH_UNEQUAL) * bound_s


class CutPlanner(Protocol):
    """Plans a profile's batches in micro-batches."""

    def cut(self, counts: Mapping[str, int]) -> MicroBatched:
        """Into so many, by task. Raises NoPlanError where they cannot be."""
        ...

    def quickly(self, cut: MicroBatched, than_s: float) -> Judged | None:
        """A plan of one micro-batch of each task without a long search; None if nothing fits, or if all
        micro-batches would take no less than `than_s`.
        """
        ...

    def searched(self, cut: MicroBatched) -> Found | None:
        """The best plan of one micro-batch of each task; None if nothing fits."""
        ...


@dataclass(frozen=True)
class OneTypeCutPlanner:
    """On devices of one type."""

    profile: Profile
    cluster: Cluster
    strategy: StrategyName
    effort: int

    def cut(self, counts: Mapping[str, int]) -> MicroBatched:
        return in_micro_batches(self.profile, counts, self.cluster)

    def quickly(self, cut: MicroBatched, than_s: float) -> Judged | None:
        one_s = than_s / rounds_of(cut.first, cut.counts)
        one = least_fallback(cut.one, self.cluster, self.strategy, ONE_TYPE, recomputes=False, than_s=one_s)
        return None if one is None else one.judged

    def searched(self, cut: MicroBatched) -> Found | None:
        return find(cut.one, self.cluster, self.strategy, self.effort)


def find_in(cut: MicroBatched, planner: CutPlanner) -> Found | None:
    """The best plan with these micro-batches; None if nothing fits."""
    one = planner.searched(cut)
    if one is None or not cut.counts:
        return one
    best = in_rounds(cut, one.best)
    return None if best is None else Found(best, one.is_short, one.note, cut, one.sharding)


def find_in_asked(cut: MicroBatched, planner: CutPlanner) -> Found | None:
    """The best plan with micro-batches that are asked for; None if nothing fits. Of one micro-batch of each
    task a quick plan that gives up nothing may take as long as a longer search's, and less in all rounds.
    """
    found = find_in(cut, planner)
    if found is None or not cut.counts or found.note is not None:
        return found
    quick = planner.quickly(cut, inf)
    rounds = None if quick is None else in_rounds(cut, quick)
    return found if rounds is None or found.best.rank() <= rounds.rank() else replace(found, best=rounds)


def in_best_micro_batches(
    profile: Profile, divisor: int, planner: CutPlanner, whole: Found | None, than_s: float = inf
) -> Found | None:
    """The best plan with as many micro-batches as it takes, where memory is short: of quick plans that keep
    ever less of the batch that keeps most, or ever less of all batches alike, instead of recomputing it, as
    long as that gains.

    Args:
        divisor: of a micro-batch's samples, where that can be: the number of devices that share them equally.
        whole: the best plan of whole batches.
        than_s: an iteration of another kind; what takes much longer is not searched for longer.
    """
    by_most = [micro_batches_for(profile, times, divisor) for times in KEPT_LESS]
    alike = [alike_micro_batches(profile, count) for count in ALIKE]
    known_s = than_s if whole is None else min(than_s, whole.best.prediction.iteration_s)
    far_s = FAR * known_s
    found = (best_cut(by_most, planner, 1, far_s), best_cut(alike, planner, PATIENCE, far_s))
    quick = min((each for each in found if each is not None), key=lambda each: each[0].rank(), default=None)
    # A longer search may make a quick plan faster, but not by much.
    if quick is None or quick[0].prediction.iteration_s > NEAR * known_s:
        return whole
    searched = find_in(quick[1], planner)
    best = Found(quick[0], is_short=True, cut=quick[1], sharding=profile.sharding)
    if searched is not None and searched.best.rank() < best.best.rank():
        best = searched
    return best if whole is None or best.best.rank() < whole.best.rank() else whole


def best_cut(
    wanted: Iterable[Mapping[str, int]], planner: CutPlanner, patience: int, far_s: float = inf
) -> tuple[Judged, MicroBatched] | None:
    """The best of quick plans with ever more micro-batches, up to the first so many in a row that are not
    better than one before, or take longer than `far_s`.
    """
    best: tuple[Judged, MicroBatched] | None = None
    known: list[Mapping[str, int]] = []
    worse = 0
    for counts in wanted:
        if not counts or counts in known:
            continue
        known.append(counts)
        try:
            cut = planner.cut(counts)
            one = planner.quickly(cut, far_s if best is None else min(far_s, best[0].prediction.iteration_s))
        except NoPlanError:  # shares of so few samples have no allocation here; fewer cuts may have
            continue
        found = None if one is None else in_rounds(cut, one)
        if found is not None and (best is None or found.rank() < best[0].rank()):
            best = found, cut
            worse = 0 if found.prediction.iteration_s <= far_s else worse + 1
        elif best is not None:
            worse += 1
        if worse == patience:
            break
    return best
