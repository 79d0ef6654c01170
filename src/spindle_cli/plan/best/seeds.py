"""Where memory is short: one quick plan for each kind of saving, and the search that goes on from the best.

A *seed* cuts batches into micro-batches, shards parameters or gradients, and recomputes, as far as devices
have room for what activations are left. Seeds differ in what is sharded and in how tasks are cut; in the same
room each part of the MetaGraph does what is fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.in_memory import NEAR_BOUND, searched_over_everything
from spindle_cli.plan.best.micro_batches import (
    Cut,
    MicroBatched,
    alike_micro_batches,
    cuts_of_parts,
)
from spindle_cli.plan.best.request import PlanRequest, gives_up_memory
from spindle_cli.plan.best.rounds import in_rounds
from spindle_cli.plan.best.sharding import describe, shardings_to_try
from spindle_cli.plan.problem import MemoryFallback
from spindle_cli.plan.search.evaluate import EvaluatedCandidate
from spindle_cli.plan.search.memory_fallback import (
    ABOVE_BOUND,
    NEAR,
    OrLessS,
    given_up,
    itself,
    may_be_faster,
    may_fit,
    splits,
)
from spindle_cli.plan.search.memory_fallback import describe as describe_fallback
from spindle_cli.plan.search.passes_apart import told_apart, with_passes_apart
from spindle_cli.plan.search.posed import NO_SEARCH, Posed, Posing
from spindle_cli.plan.search.room import Fitted, all_within
from spindle_cli.profile.types import Profile

# How many micro-batches all tasks have alike; and after how many of these in a row that gain nothing to stop.
ALIKE = (2, 3, 4, 6, 8, 12, 16)
PATIENCE = 2
# Of all seconds of compute, what MetaOps have that may run on fewer devices: with less a longer search of
# candidates finds nothing.
WORTH_A_SEARCH = 0.05
# The room for activations is found to one of so many steps of what takes most of it, a power of two.
ROOM_STEPS = 64
# By how many steps less room is looked at, too: what spreads memory less evenly fits only so, and may be
# faster.
LESS_ROOM = (0, 1, 2, 4, 8)
# Of the iteration, what transfers and gathers take at least where parameters that stay whole may gain.
GATHERS_SHOW = 0.02


@dataclass(frozen=True)
class MemorySaving:
    """What is done to save memory: micro-batches, sharding and recomputation.

    Attributes:
        fallback: what one micro-batch of each task recomputes, moves to host memory or splits.
        posed_problem: that of one micro-batch of each task.
        cut: the micro-batches; of no task where batches stay whole.
    """

    fallback: MemoryFallback
    posed_problem: Posed
    cut: MicroBatched

    @property
    def sharding(self) -> ShardingOf:
        """Return what devices shard."""
        return self.cut.one.sharding

    @property
    def is_sharded(self) -> bool:
        """Tell whether devices shard parameters or gradients."""
        return gives_up_memory(self.sharding)

    def of_all(self, one: EvaluatedCandidate | None) -> EvaluatedCandidate | None:
        """Return the plan of all micro-batches, given that of one of each task; None if it does not fit."""
        return one if one is None or not self.cut.counts else in_rounds(self.cut, one)


@dataclass(frozen=True)
class Seed:
    """A quick plan of all micro-batches that saves memory."""

    plan: EvaluatedCandidate
    saving: MemorySaving

    @property
    def seconds(self) -> float:
        """Return the predicted iteration."""
        return self.plan.prediction.iteration_s

    def rank(self) -> tuple[float, float, int]:
        return self.plan.rank()


@dataclass(frozen=True)
class Seeds:
    """Makes the seeds of a profile, and searches on from them.

    Attributes:
        profile: sharded as is asked for.
        cut: cuts a profile, or a part of it.
    """

    profile: Profile
    cluster: Cluster
    request: PlanRequest
    posing: Posing
    cut: Cut

    def or_better(
        self, incumbent: PlanResult | None, bound_s: float, or_less_s: OrLessS = itself
    ) -> PlanResult | None:
        """Return the best plan that the search finds from seeds that come near the best known, or the
        incumbent if none is better, or memory is not short, or there is next to nothing to gain; None if
        nothing fits, or nothing that comes near another kind of plan.

        Args:
            incumbent: the best of other plans.
            bound_s: before which no schedule of whole batches ends.
            or_less_s: of the iteration of a plan that is known, that, or a shorter one of another kind.
        """
        if incumbent is not None and not incumbent.is_short:
            return incumbent
        known_s = inf if incumbent is None else incumbent.best.prediction.iteration_s
        if incumbent is not None and incumbent.best.prediction.compute_s <= NEAR_BOUND * bound_s:
            return incumbent
        has_searched = incumbent is not None and incumbent.is_searched
        kinds = [None if has_searched else self.sharded_as_requested(known_s), self.sharded_more()]
        seeds = sorted((seed for seed in kinds if seed is not None), key=Seed.rank)
        least_s = min([known_s, *(seed.seconds for seed in seeds)])
        far_s = NEAR * or_less_s(least_s)
        for seed in seeds:
            searched = self._searched(seed) if seed.seconds <= far_s else None
            if searched is not None and (incumbent is None or searched.best.rank() < incumbent.best.rank()):
                incumbent = searched
        return incumbent

    def sharded_as_requested(self, known_s: float) -> Seed | None:
        """Return the best seed that shards what is asked for, and nothing more."""
        whole = self.splitting(known_s)
        if not self.request.gives_up or self.request.micro_batches is not None:
            return whole
        return _least(whole, self.in_room(self.profile, None), None if whole else self.alike())

    def splitting(self, than_s: float) -> Seed | None:
        """Return the seed of whole batches, or of the micro-batches that are asked for, that splits layers
        with the shortest bound of those that fit, and recomputes least.

        Args:
            than_s: what is not faster may be left out.
        """
        counts = self.request.micro_batches or {}
        one = self.cut(self.profile, counts).one
        than_s = inf if counts else than_s
        for split in splits(one, self.cluster, self.posing, than_s / (1 + ABOVE_BOUND)):
            if not may_be_faster(split.posed_problem, than_s):
                break

            def fitted(step: int, split: MemoryFallback = split.fallback) -> Fitted:
                less = given_up(one, 1 - step / ROOM_STEPS, split.split)
                return Fitted(counts, replace(less, least_tp=split.least_tp, split=split.split))

            # That whole layers recompute nothing has been tried.
            most = ROOM_STEPS if split.fallback.split else ROOM_STEPS - 1
            roomiest = _roomiest(fitted, lambda fitted: self._soonest(self.profile, fitted), most)
            if roomiest is not None:
                step, seed = roomiest
                less = (fitted(step - steps) for steps in LESS_ROOM if steps <= step)
                return _least(seed, *(self._quickly(self._saving(self.profile, some)) for some in less))
        return None

    def alike(self) -> Seed | None:
        """Return the best seed that cuts all tasks alike and recomputes nothing, trying ever more
        micro-batches as long as they gain.
        """
        best: Seed | None = None
        worse = 0
        tried: list[Mapping[str, int]] = [{}]
        is_free = not gives_up_memory(self.cut(self.profile, {}).one.sharding)
        for counts in (alike_micro_batches(self.profile, count) for count in ALIKE if is_free):
            if counts in tried:
                continue
            tried.append(counts)
            saving = self._saving(self.profile, Fitted(counts, MemoryFallback()))
            seed = _least(self._by_baseline(saving), self._quickly(saving))
            if seed is not None and (best is None or seed.rank() < best.rank()):
                best, worse = seed, 0
            elif best is not None:
                worse += 1
            if worse == PATIENCE:
                break
        return best

    def sharded_more(self) -> Seed | None:
        """Return the best seed that shards what memory asks for; None where nothing more may be sharded."""
        if not self.request.gives_up or self.request.sharding is not None:
            return None
        best: Seed | None = None
        for sharding in shardings_to_try(self.profile, self.cluster):
            if Sharding.PARAMETERS in sharding.values() or best is None or _shows_gathers(best):
                seed = self.in_room(self.profile.sharded(sharding), self.request.micro_batches)
                if seed is not None and (best is None or seed.rank() < best.rank()):
                    best = seed
        return best

    def in_room(self, profile: Profile, counts: Mapping[str, int] | None) -> Seed | None:
        """Return the seed in which each part of the MetaGraph does what is fastest with as much room for
        activations as fits.

        Args:
            counts: of micro-batches, by task; None: as is fastest.
        """
        ways = cuts_of_parts(profile, self.cut, counts)
        if not all(ways):
            return None
        most = max(way.kept_bytes for of_part in ways for way in of_part)

        roomiest = _roomiest(
            lambda step: all_within(ways, most * step / ROOM_STEPS),
            lambda fitted: self._by_baseline(self._saving(profile, fitted)),
        )
        return roomiest and _least(roomiest[1], self._quickly(roomiest[1].saving))

    def _saving(self, profile: Profile, fitted: Fitted) -> MemorySaving | None:
        """Return what fits so much room; None where devices have no room for it, or some component whose
        tasks are cut so has no common degree on all devices.
        """
        try:
            cut = self.cut(profile, fitted.counts)
        except NoPlanError:
            return None
        posed_problem = self.posing.posed(cut.one, self.cluster, fitted.fallback)
        return MemorySaving(fitted.fallback, posed_problem, cut) if may_fit(posed_problem.problem) else None

    def _soonest(self, profile: Profile, fitted: Fitted) -> Seed | None:
        """Return the best baseline, or where none fits the best that a quick search finds."""
        saving = self._saving(profile, fitted)
        return self._by_baseline(saving) or self._quickly(saving)

    def _by_baseline(self, saving: MemorySaving | None) -> Seed | None:
        """Return the best of the baselines, which take least time to find."""
        if saving is None:
            return None
        names = saving.posed_problem.baselines(self.request.strategy)
        if saving.is_sharded and "sequential" in names:
            names = ("sequential",)  # what is sharded runs on all devices in any case
        plans = [plan for name in names if (plan := saving.posed_problem.by_baseline(name)) is not None]
        return _seed(saving, min(plans, key=EvaluatedCandidate.rank, default=None))

    def _quickly(self, saving: MemorySaving | None) -> Seed | None:
        """Return the best of a quick search; None if nothing fits, or what is sharded leaves no choice."""
        if saving is None or saving.is_sharded:
            return None
        return _seed(saving, saving.posed_problem.best(self.request.strategy, NO_SEARCH)[0])

    def _searched(self, seed: Seed) -> PlanResult | None:
        """Search on from a seed; None if times for each pass, which what is sharded needs, do not fit."""
        saving, strategy, effort = seed.saving, self.request.strategy, self.request.effort
        fallback = saving.fallback
        best = min(self._plans_from(seed), key=EvaluatedCandidate.rank, default=None)
        if best is None:
            return None
        if strategy == "spindle" and effort != NO_SEARCH and not saving.is_sharded:
            whole = saving.cut.all if saving.cut.counts else saving.cut.first
            searched = searched_over_everything(whole, [best], effort)
            if searched is not None:  # it splits as is fastest
                best, fallback = searched, MemoryFallback()
        notes = [describe_fallback(best.slices, fallback)]
        if self.request.sharding is None and saving.is_sharded:
            notes.insert(0, describe(saving.sharding))
        note = " ".join(part for part in notes if part is not None) or None
        return PlanResult(best, True, note, saving.cut if saving.cut.counts else None, saving.sharding)

    def _plans_from(self, seed: Seed) -> list[EvaluatedCandidate]:
        """Return the seed's plan, and that of a longer search where enough MetaOps may run on fewer devices
        for that; where batches stay whole, each in its best order of passes.
        """
        saving, problem = seed.saving, seed.saving.posed_problem.problem
        plans: list[EvaluatedCandidate | None] = [seed.plan]
        free_s = sum(
            node.num_ops * node.points[-1].op_s
            for node in problem.nodes
            if node.points[0].num_devices < problem.num_devices
        )
        if free_s > WORTH_A_SEARCH * problem.serial_s:
            plans.append(
                saving.of_all(saving.posed_problem.best(self.request.strategy, self.request.effort)[0])
            )
        fitting = [plan for plan in plans if plan is not None]
        if saving.cut.counts:
            return fitting
        reordered = (told_apart(problem, with_passes_apart(problem, plan)) for plan in fitting)
        return [plan for plan in reordered if plan is not None]


def _roomiest(
    within: Callable[[int], Fitted | None], plan: Callable[[Fitted], Seed | None], most: int = ROOM_STEPS
) -> tuple[int, Seed] | None:
    """Find by halving the plan with as much room for activations as fits, and at which of `ROOM_STEPS` that
    is; None if nothing fits.

    Args:
        within: gives what is done in so many steps of room; None if that is too little.
        plan: gives the seed that does so; None if it does not fit.
        most: the step to begin with.
    """
    roomiest: tuple[int, Seed] | None = None
    last_fitted: Fitted | None = None
    low, high, step = 0, most, most
    while low <= high:
        fitted = within(step)
        if fitted is None or fitted == last_fitted:  # too little room, or as fast as with less
            low = step + 1
        elif (seed := plan(fitted)) is not None:
            roomiest, last_fitted, low = (step, seed), fitted, step + 1
        else:
            high = step - 1
        step = (low + high) // 2
    return roomiest


def _seed(saving: MemorySaving, one: EvaluatedCandidate | None) -> Seed | None:
    plan = saving.of_all(one)
    return None if plan is None else Seed(plan, saving)


def _least(*seeds: Seed | None) -> Seed | None:
    return min((seed for seed in seeds if seed is not None), key=Seed.rank, default=None)


def _shows_gathers(seed: Seed) -> bool:
    """Tell whether gathers may take so much that a plan without, which has less room, may be faster."""
    return seed.plan.prediction.transfer_s > GATHERS_SHOW * seed.seconds
