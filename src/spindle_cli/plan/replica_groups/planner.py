"""The best plan of some replica groups: planned as devices of a cluster of their own, then put on all of
theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf

from spindle_cli.account.types import Pass
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.find import PlanResult, find
from spindle_cli.plan.best.micro_batches import MicroBatched, cut_profile
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.best.request import PlanRequest
from spindle_cli.plan.best.seeds import Seeds
from spindle_cli.plan.ordering.orders import mirrored
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.replica_groups.cluster import ReplicaGroup, cluster_of
from spindle_cli.plan.replica_groups.profile import beside_bytes, on_replica_groups, way_on
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, measure_as_they_are
from spindle_cli.plan.slices import rows_of
from spindle_cli.plan.types import Slice
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import Profile

# How much memory is left free, tried in turn, as parts of what comes on top of a plan of replica groups: it
# is less where not all of that is there in the fullest moment.
LEFT_FREE = (0.0, 0.5, 1.0, 1.5)


@dataclass(frozen=True)
class ReplicaGroupsPlanner:
    """Plans some replica groups.

    Attributes:
        profile: of the devices, with what replica groups share out.
        seen: of the replica groups, of whole batches.
        cluster: of the devices.
        replica_groups: those of one kind one behind the other.
    """

    profile: Profile
    seen: Profile
    cluster: Cluster
    replica_groups: Sequence[ReplicaGroup]
    effort: int

    @property
    def num_kinds(self) -> int:
        """How many kinds of replica groups there are."""
        return len({replica_group.kind for replica_group in self.replica_groups})

    @cached_property
    def lower_bound_s(self) -> float:
        """Seconds that no schedule of whole batches is shorter than, gathers and scatters included."""
        small = cluster_of(self.replica_groups, self.cluster)
        return ProblemPoser().posed(self.seen, small).lower_bound_s

    def planned(self, than_s: float) -> PlanResult | None:
        """The best plan that fits, and may take less than so long; None: there is none."""
        for part in LEFT_FREE:
            of_replica_groups = self.planned_within(part, than_s)
            if of_replica_groups is None or of_replica_groups.best.prediction.iteration_s >= than_s:
                return None
            result = self.on_devices(of_replica_groups)
            if result is not None:
                return result
        return None

    def planned_within(self, part: float, than_s: float = inf) -> PlanResult | None:
        """The best plan of replica groups as devices, with this part of what comes on top left free; None:
        none fits. What is not faster than `than_s` may be left out, and micro-batches that take much longer.
        """
        free_bytes = part * beside_bytes(self.profile, self.cluster)
        small = cluster_of(self.replica_groups, self.cluster, free_bytes)
        posing = ProblemPoser()
        whole = find(self.seen, small, "spindle", self.effort, posing)
        if whole is not None and not whole.is_short:
            return whole

        def cut(profile: Profile, counts: Mapping[str, int]) -> MicroBatched:
            counts = {task: count for task, count in counts.items() if count > 1}
            seen = on_replica_groups(cut_profile(profile, counts, self.cluster), self.replica_groups)
            if seen is None:
                raise NoPlanError("micro-batches: replica groups have more devices than these have samples")
            return MicroBatched(seen, counts, small)

        request = PlanRequest(effort=self.effort, sharding={})
        seeds = Seeds(self.profile, small, request, posing, cut)
        return seeds.or_better(whole, 0.0, partial(min, than_s))

    def on_devices(self, of_replica_groups: PlanResult) -> PlanResult | None:
        """A plan of replica groups on all of their devices; None: it does not fit."""
        counts = {} if of_replica_groups.cut is None else of_replica_groups.cut.counts
        cut = MicroBatched(cut_profile(self.profile, counts, self.cluster), counts, self.cluster)
        evaluated = on_devices(cut.all if counts else cut.first, of_replica_groups.best, self.replica_groups)
        if evaluated is None:
            return None
        note = self._note() if of_replica_groups.note is None else f"{self._note()} {of_replica_groups.note}"
        return PlanResult(evaluated, True, note, cut if counts else None, self.profile.sharding)

    def _note(self) -> str:
        sizes = sorted({replica_group.size for replica_group in self.replica_groups}, reverse=True)
        counts = [
            f"{sum(replica_group.size == size for replica_group in self.replica_groups)} of {size}"
            for size in sizes
        ]
        told = (
            f"{len(self.replica_groups)} replica groups of {sizes[0]}"
            if len(sizes) == 1
            else f"replica groups: {', '.join(counts)}"
        )
        keys = ", ".join(self.profile.sharding)
        return f"Memory asks for sharing out the parameters of {keys} by {told} devices."


def planner_of(
    profile: Profile, cluster: Cluster, replica_groups: Sequence[ReplicaGroup], effort: int
) -> ReplicaGroupsPlanner | None:
    """The planner of a cut into replica groups; None: a MetaOp does not run on one of them.

    Args:
        profile: with what replica groups share out.
    """
    seen = on_replica_groups(profile, replica_groups)
    return None if seen is None else ReplicaGroupsPlanner(profile, seen, cluster, replica_groups, effort)


def on_devices(
    problem: Problem, evaluated: EvaluatedCandidate, replica_groups: Sequence[ReplicaGroup]
) -> EvaluatedCandidate | None:
    """The plan of replica groups on all of their devices, its passes in the same order; None if it does not
    fit their memory.

    Args:
        problem: of the devices, with what replica groups share out; its MetaOps have the names of those of
            the replica groups'.
        evaluated: the plan of the replica groups.
    """
    seen = {
        replica_group.kind: seen_on(problem.profile, replica_group.cluster)
        for replica_group in replica_groups
    }
    on = [replica_groups[slice_.devices[0]] for slice_ in evaluated.slices]
    slices = tuple(
        _expanded(slice_, replica_group, seen[replica_group.kind])
        for slice_, replica_group in zip(evaluated.slices, on, strict=True)
    )
    slices = timed(problem, slices, tuple(_order(evaluated.slices)))
    return measure_as_they_are(problem, "spindle", slices)


def _expanded(slice_: Slice, replica_group: ReplicaGroup, seen: Profile) -> Slice:
    """Args: seen: the profile as the replica group's type of device sees it."""
    metaop = seen.by_name[slice_.metaop]
    way = way_on(metaop, replica_group.size, seen.sharding)
    assert way is not None, "the replica group's profile has it"
    replica_group_share = {
        "devices": replica_group.devices[: way.dp],
        "dp": way.dp,
        "rows": rows_of(metaop.batch_size, way.dp),
    }
    times = {"backward_start_s": None, "backward_end_s": None}
    return slice_.model_copy(update=replica_group_share | times)


def _order(slices: Sequence[Slice]) -> Iterator[Pass]:
    """All passes as they start; `slices` are in order of start."""
    if any(slice_.backward_s is None for slice_ in slices):
        yield from mirrored(range(len(slices)))
        return
    starts = [
        (slice_.times_s[is_backward][0], Pass(index, is_backward=bool(is_backward)))
        for index, slice_ in enumerate(slices)
        for is_backward in (0, 1)
    ]
    yield from (pass_ for _, pass_ in sorted(starts))
