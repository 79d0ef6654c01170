"""Which buckets a rank's parameters lie in, and where those that are gathered lie while they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from spindle_cli.account.holdings import GatherUnit, Span, places_of
from spindle_cli.account.types import ParameterGroup
from spindle_cli.costs.parameters import Summing
from spindle_cli.files.sharding import Sharding
from spindle_cli.runtime.backends.side_stream import SideStream
from spindle_cli.runtime.communication.buckets import Bucket, ShardedBucket
from spindle_cli.runtime.communication.collectives import Levels, Members
from spindle_cli.runtime.communication.communicators import Communicators
from spindle_cli.runtime.communication.flat_bucket import FlatBucket, FrozenBucket
from spindle_cli.runtime.communication.gathered_bucket import GatheredBucket
from spindle_cli.runtime.communication.pass_bucket import PassBucket
from spindle_cli.runtime.communication.reached import Steady
from spindle_cli.runtime.communication.replica_groups.group_ranges import ReplicaGroups
from spindle_cli.runtime.communication.replica_groups.replica_group_bucket import ReplicaGroupBucket
from spindle_cli.runtime.memory.gather_memory import ALIGNMENT_BYTES, EXCHANGES_STORAGES, GatherMemory
from spindle_cli.runtime.update.owned_ranges import round_up
from spindle_cli.workload.initial.types import OwnValues

# Those whose ranks step a range each.
RangedBucket = ShardedBucket | PassBucket
# Those that are summed between passes, or in one that completes them.
SummedBucket = Bucket | ShardedBucket | GatheredBucket | ReplicaGroupBucket
TrainedBucket = SummedBucket | PassBucket
AnyBucket = TrainedBucket | FrozenBucket


@dataclass(frozen=True)
class BucketMaker:
    """Makes the buckets of a rank.

    Attributes:
        parameters: the rank's, by canonical name, which is also the groups' key for them.
        stepped_whole: those that every rank with them steps; of the others each steps its range.
        shards: of parameters without memory, what the rank has; buckets take it away.
        side: where sums that go by nodes wait for their first parts.
        factors: the dtype of the factors of linear maps; None: that of their matrices.
        steady: the parameters that the same passes reach in every step.
    """

    parameters: Mapping[str, nn.Parameter]
    communicators: Communicators
    rank: int
    stepped_whole: Collection[str]
    shards: MutableMapping[str, OwnValues]
    side: SideStream
    factors: torch.dtype | None = None
    steady: Steady = field(default_factory=dict)

    def of(self, group: ParameterGroup) -> tuple[AnyBucket, ...]:
        """Make the buckets of a group that several ranks share, this one among them: one for each dtype."""
        names = [name for name, _ in group.blocks]
        if not group.is_trained:
            inside, replica_groups = (
                self._inside(group),
                ReplicaGroups.of(group) if group.replica_groups else None,
            )
            return tuple(
                FrozenBucket(alike, inside, group.sharding, self.shards, replica_groups)
                for alike in self._by_dtype(names)
            )
        members = self._summing(group)
        if group.is_gathered:
            return tuple(self._gathered(name, group, members) for name in names)
        in_ranges = [
            name for name in names if name not in self.stepped_whole and group.sharding is not Sharding.NONE
        ]
        return (
            *(self._ranged(alike, group, members) for alike in self._by_dtype(in_ranges)),
            *(
                Bucket(alike, members, self.steady)
                for alike in self._by_dtype([name for name in names if name not in in_ranges])
            ),
        )

    def _summing(self, group: ParameterGroup) -> Members:
        """Return the members that sum and gather a group between passes."""
        members = Members.of(group.devices, self.rank, self.communicators.summing(group.devices), group)
        if not group.nodes:
            return members
        inside, across = (
            Members.of(part, self.rank, self.communicators.summing(part))
            for parts in (group.nodes, group.across)
            for part in parts
            if self.rank in part
        )
        return members.with_levels(Levels(inside, across, self.side))

    def _gathered(self, name: str, group: ParameterGroup, members: Members) -> GatheredBucket:
        factors = self.factors if group.summing is Summing.FACTORS else None
        parameter = self.parameters[name]
        return GatheredBucket(
            name,
            parameter,
            members,
            group.summing,
            group.share_tokens,
            factors,
            is_steady=parameter in self.steady,
        )

    def _ranged(
        self, parameters: Mapping[str, nn.Parameter], group: ParameterGroup, members: Members
    ) -> RangedBucket:
        if not group.sharding.is_by_pass:
            return ShardedBucket(parameters, members)
        inside = self._inside(group)
        if group.replica_groups:
            return ReplicaGroupBucket(
                parameters, inside, group.sharding, members, self.shards, ReplicaGroups.of(group)
            )
        return PassBucket(parameters, inside, group.sharding, members.communicator, self.shards)

    def _inside(self, group: ParameterGroup) -> Members:
        """Who gathers and sums together inside of passes."""
        replica_group = group.in_replica_group(self.rank)
        return Members.of(
            replica_group.devices, self.rank, self.communicators.sharing(replica_group.devices), replica_group
        )

    def _by_dtype(self, names: Iterable[str]) -> list[dict[str, nn.Parameter]]:
        by_dtype: dict[torch.dtype, dict[str, nn.Parameter]] = {}
        for name in names:
            parameter = self.parameters[name]
            by_dtype.setdefault(parameter.dtype, {})[name] = parameter
        return list(by_dtype.values())


def lay_out(
    groups: Iterable[ParameterGroup],
    buckets: Mapping[int, Sequence[AnyBucket]],
    runs: Collection[int] | None = None,
) -> GatherMemory | None:
    """Give each bucket that is fetched its place in one piece of memory. `buckets`: by group. `runs`: the
    slices that this rank runs; None: all that are said. Gives nothing where this torch has no way to.
    """
    if not EXCHANGES_STORAGES:
        return None
    units: dict[FlatBucket, GatherUnit] = {}
    for group in groups:
        uses = map(Span, group.slices, group.first_ops, group.last_ops)
        spans = [span for span in uses if runs is None or span.slice_index in runs]
        for bucket in buckets.get(group.index, ()):
            if isinstance(bucket, FlatBucket) and bucket.is_fetched and not bucket.is_kept:
                size = round_up(bucket.gathered_bytes, ALIGNMENT_BYTES)
                units[bucket] = GatherUnit(size, tuple(sorted(spans)))
    if not units:
        return None
    places = places_of(tuple(units.values()))
    memory = GatherMemory(round(places.num_bytes), next(iter(units)).parameters[0].device)
    for placed, begin in zip(units, places.offsets, strict=True):
        placed.gather_into(memory, round(begin))
    return memory
