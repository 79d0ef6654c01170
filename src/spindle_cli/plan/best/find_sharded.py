"""The best plan whose devices share out parameters or gradients, where memory is short.

What uses shared-out parameters runs on all devices, so that little is left to search: each sharding is tried
with one baseline's schedule, and only the best one is searched for longer, where other MetaOps have a choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import tee
from math import inf

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.plan.best.find import KEPT_LESS, Found
from spindle_cli.plan.best.micro_batches import (
    MicroBatched,
    cuts_of_parts,
    in_micro_batches,
    micro_batches_for,
)
from spindle_cli.plan.best.rounds import in_rounds
from spindle_cli.plan.best.sharding import describe, on_all_devices, shardings_to_try
from spindle_cli.plan.problem import MemoryFallback
from spindle_cli.plan.search.judge import Judged
from spindle_cli.plan.search.memory_fallback import (
    NEAR,
    STEPS,
    TightProblem,
    may_be_faster,
    may_fit,
    recomputing,
)
from spindle_cli.plan.search.memory_fallback import describe as describe_fallback
from spindle_cli.plan.search.passes_apart import apart, with_passes_apart
from spindle_cli.plan.search.posed import Posing
from spindle_cli.plan.search.room import Fitted, all_within
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import Profile

# Of all seconds of compute, what MetaOps have that may run on fewer devices: with less a longer search finds
# nothing.
WORTH_A_SEARCH = 0.05

# The room for activations is found to one of so many steps of what takes most of it, a power of two.
ROOM_STEPS = 64

# Of the iteration, what transfers and gathers take at least where parameters that stay whole may gain.
GATHERS_SHOW = 0.02


@dataclass(frozen=True)
class QuickSharding:
    """A quick plan of a profile that shares out parameters.

    Attributes:
        judged: of whole batches, or of all micro-batches.
        tight: whose slices it has, or those of one micro-batch of each task.
        cut: into which micro-batches; None: of whole batches.
    """

    judged: Judged
    tight: TightProblem
    cut: MicroBatched | None = None

    def rank(self) -> tuple[float, float, int]:
        return self.judged.rank()


def quick_sharding(
    profile: Profile,
    cluster: Cluster,
    strategy: StrategyName,
    posing: Posing,
    micro_batches: Mapping[str, int] | None = None,
    asked: ShardingOf | None = None,
    than_s: float = inf,
) -> QuickSharding | None:
    """The best of quick plans for each sharding that is worth a try; None if none fits.

    Args:
        micro_batches: as they have to be; None: as many as memory asks for.
        asked: what is to be shared out; None: what memory asks for.
        than_s: an iteration of another kind; on several types of device what cannot be faster may be left
            out.
    """
    found: list[QuickSharding] = []
    for sharding in shardings_to_try(profile, cluster, posing) if asked is None else [asked]:
        gathers = Sharding.PARAMETERS in sharding.values()
        if gathers or not found or _shows_gathers(min(found, key=QuickSharding.rank)):
            one = _quick(profile.sharded(sharding), cluster, strategy, posing, micro_batches, than_s)
            found += [] if one is None else [one]
    return min(found, key=QuickSharding.rank, default=None)


def in_best_sharding(
    quick: QuickSharding,
    strategy: StrategyName,
    effort: int,
    whole: Found | None,
    than_s: float = inf,
    *,
    is_asked: bool,
) -> Found | None:
    """The best quick plan, searched longer where it comes near; or `whole` where it is not better.

    Args:
        whole: the best plan of another search: that shares out optimizer state alone, or what is asked for.
        than_s: an iteration of another kind.
        is_asked: what is shared out is not what memory asks for, but what the user does.
    """
    known_s = than_s if whole is None else min(than_s, whole.best.prediction.iteration_s)
    if quick.judged.prediction.iteration_s > NEAR * known_s:
        return whole
    best = _searched(quick, strategy, effort)
    if best is not None and not is_asked:
        notes = (describe(best.sharding), best.note)
        best = replace(best, note=" ".join(note for note in notes if note is not None))
    if best is None or (whole is not None and whole.best.rank() <= best.best.rank()):
        return whole
    return best


def _shows_gathers(quick: QuickSharding) -> bool:
    """Whether gathers may take so much of a plan that one without, which has less room, may be faster."""
    return quick.judged.prediction.transfer_s > GATHERS_SHOW * quick.judged.prediction.iteration_s


def _quick(
    profile: Profile,
    cluster: Cluster,
    strategy: StrategyName,
    posing: Posing,
    micro_batches: Mapping[str, int] | None,
    than_s: float,
) -> QuickSharding | None:
    """Of whole batches if these fit without giving up anything; else the better one of those that recompute
    activations and those of micro-batches, which recompute where they have to; None if nothing fits.
    """
    if not cluster.is_mixed:
        return _in_room(profile, cluster, strategy, posing, micro_batches)
    found: list[QuickSharding] = []
    if not micro_batches:
        whole = _Trial(on_all_devices(profile, cluster), cluster, strategy, posing)
        if not whole.may_be_faster(than_s):
            return None
        found += whole.at(0) or whole.least_recomputing()
        if found and not found[0].tight.fallback.keeps_less:
            return found[0]
    cuts, again = tee(_cuts(profile, cluster, strategy, posing, micro_batches))
    found += _best_cut(cuts, recomputes=False) or _best_cut(again, recomputes=True)
    return min(found, key=QuickSharding.rank, default=None)


def _in_room(
    profile: Profile,
    cluster: Cluster,
    strategy: StrategyName,
    posing: Posing,
    micro_batches: Mapping[str, int] | None,
) -> QuickSharding | None:
    """Of whole batches if these fit without giving up anything; else with as much room for activations as
    fits, found by halving, in which each part does what is fastest.
    """
    ways = cuts_of_parts(profile, cluster, micro_batches)
    if not all(ways):
        return None
    most = max(way.kept_bytes for of_part in ways for way in of_part)
    found: QuickSharding | None = None
    known: Fitted | None = None
    low, high, step = 0, ROOM_STEPS, ROOM_STEPS
    while low <= high:
        fitted = all_within(ways, most * step / ROOM_STEPS)
        if fitted is None or fitted == known:  # too little room, or as fast as with less
            low = step + 1
        elif (one := _fitted(profile, cluster, strategy, posing, fitted)) is not None:
            found, known, low = one, fitted, step + 1
        else:
            high = step - 1
        step = (low + high) // 2
    return found


def _fitted(
    profile: Profile, cluster: Cluster, strategy: StrategyName, posing: Posing, fitted: Fitted
) -> QuickSharding | None:
    """A plan of what parts do for the room that they have; None if it does not fit."""
    try:
        cut = in_micro_batches(profile, fitted.counts, cluster, posing.problem)
    except NoPlanError:  # a component whose tasks are cut so has no common degree on all devices
        return None
    tight = TightProblem(fitted.fallback, posing.posed(cut.one, cluster, fitted.fallback), posing)
    if not may_fit(tight.problem):
        return None
    one = tight.posed.by_baseline("sequential" if strategy == "spindle" else strategy)
    if one is None or not fitted.counts:
        return None if one is None else QuickSharding(one, tight)
    judged = in_rounds(cut, one)
    return None if judged is None else QuickSharding(judged, tight, cut)


def _cuts(
    profile: Profile,
    cluster: Cluster,
    strategy: StrategyName,
    posing: Posing,
    micro_batches: Mapping[str, int] | None,
) -> Iterator[tuple[MicroBatched, _Trial]]:
    """Ever more micro-batches, or those that there have to be."""
    wanted = [micro_batches] if micro_batches is not None else []
    if micro_batches is None:
        wanted += [micro_batches_for(profile, times, posing.divisor(cluster)) for times in KEPT_LESS]
    for number, counts in enumerate(wanted):
        if counts and counts not in wanted[:number]:
            try:
                cut = in_micro_batches(profile, counts, cluster, posing.problem)
                trial = _Trial(cut.one, cluster, strategy, posing)
            except NoPlanError:  # shares of so few samples have no allocation on all devices
                continue
            yield cut, trial


def _best_cut(cuts: Iterable[tuple[MicroBatched, _Trial]], *, recomputes: bool) -> list[QuickSharding]:
    """The best one, as long as more micro-batches gain."""
    best: QuickSharding | None = None
    for cut, trial in cuts:
        for one in trial.least_recomputing() if recomputes else trial.at(0):
            judged = in_rounds(cut, one.judged)
            if judged is None:
                continue
            if best is not None and best.rank() <= judged.rank():
                return [best]
            best = replace(one, judged=judged, cut=cut)
    return [] if best is None else [best]


class _Trial:
    """A profile whose MetaOps have been cut to all devices, by one baseline's schedule."""

    def __init__(self, profile: Profile, cluster: Cluster, strategy: StrategyName, posing: Posing) -> None:
        self._plain = TightProblem(MemoryFallback(), posing.posed(profile, cluster), posing)
        self._baseline: StrategyName = "sequential" if strategy == "spindle" else strategy

    def may_be_faster(self, than_s: float) -> bool:
        """Whether it may take less than so long, recomputing nothing."""
        return may_be_faster(self._plain.posed, than_s)

    def at(self, step: int) -> list[QuickSharding]:
        """The plan with `step` of `STEPS` of all activations recomputed, if it fits."""
        tight = recomputing(self._plain, step) if step else self._plain
        judged = None if tight is None else tight.posed.by_baseline(self._baseline)
        return [] if tight is None or judged is None else [QuickSharding(judged, tight)]

    def least_recomputing(self) -> list[QuickSharding]:
        """The plan that recomputes least of those that fit, found by halving."""
        found: list[QuickSharding] = self.at(STEPS)
        low, high = 1, STEPS - 1
        while found and low <= high:
            step = (low + high) // 2
            fitting = self.at(step)
            found = fitting or found
            low, high = (low, step - 1) if fitting else (step + 1, high)
        return found


def _searched(quick: QuickSharding, strategy: StrategyName, effort: int) -> Found | None:
    """The quick plan, or a better one of a longer search, with times for each pass; None if none fits so."""
    problem = quick.tight.problem
    free_s = sum(
        node.num_ops * node.points[-1].op_s
        for node in problem.nodes
        if node.points[0].num_devices < problem.num_devices
    )
    longer: Judged | None = None
    if free_s > WORTH_A_SEARCH * problem.serial_s:
        longer, _ = quick.tight.posed.best(strategy, effort)
    found: list[Judged | None]
    if quick.cut is not None:
        found = [quick.judged, None if longer is None else in_rounds(quick.cut, longer)]
    else:
        both = [each for each in (quick.judged, longer) if each is not None]
        passes = [with_passes_apart(problem, each) for each in both]
        found = [each if each.is_apart else apart(problem, each) for each in passes]
    best = min((each for each in found if each is not None), key=Judged.rank, default=None)
    if best is None:
        return None
    note = describe_fallback(best.slices, quick.tight.fallback)
    return Found(best, is_short=True, note=note, cut=quick.cut, sharding=problem.profile.sharding)
