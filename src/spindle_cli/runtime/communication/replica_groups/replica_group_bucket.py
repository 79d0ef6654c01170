"""Flat buckets of parameters that several replica groups of ranks share out, each for itself: within a
replica group as within any group that shares parameters out (`pass_bucket.py`); between the passes and the
update replica groups sum what each has summed, and behind it hand on what each rank has stepped of its range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from spindle_cli.files.sharding import Sharding
from spindle_cli.runtime.backends.gather_turns import GatherTurns
from spindle_cli.runtime.communication.collectives import Members
from spindle_cli.runtime.communication.pass_bucket import PassBucket
from spindle_cli.runtime.communication.replica_groups.between_replica_groups import (
    BetweenReplicaGroups,
    UnderWay,
)
from spindle_cli.runtime.communication.replica_groups.group_ranges import ReplicaGroups
from spindle_cli.workload.initial.types import OwnValues

if TYPE_CHECKING:
    from spindle_cli.runtime.communication.flat_bucket import Elements


class ReplicaGroupBucket(PassBucket):
    """Trained parameters of one dtype, of whose values and gradients each rank of a replica group keeps a
    range.

    Attributes:
        owned_ranges: what this rank steps: of its range, one part of each range that other replica groups
            keep, too.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        members: Members,
        sharding: Sharding,
        everyone: Members,
        shards: MutableMapping[str, OwnValues] | None,
        replica_groups: ReplicaGroups,
    ) -> None:
        """`members`: of the replica group, with the communicator for its passes; `everyone`: of all replica
        groups; `shards`: see `FlatBucket`.
        """
        self._position = everyone.position
        super().__init__(parameters, members, sharding, everyone.communicator, shards, replica_groups)
        self._between = BetweenReplicaGroups.of(
            self._group_ranges, everyone.position, everyone.count, everyone.communicator
        )
        self._summing: UnderWay | None = None
        self._handing_on: UnderWay | None = None

    def _stepped_elements(self) -> Iterator[Elements]:
        return self._elements_in(
            (group_range.first, group_range.last)
            for group_range in self._group_ranges
            if group_range.owner == self._position
        )

    @property
    def buffer_bytes(self) -> int:
        """Bytes that a sum over the replica groups takes while it is under way."""
        return self._between.sum_elements * self._sum.itemsize

    def start_sum(self) -> dist.Work:
        """Start the sum over the replica groups; all passes of this rank that add to it are through.
        Collective.
        """
        self._summing = self._between.start_sum(self._sum)
        return self._summing.work

    def is_summed(self) -> bool:
        """Whether `finish_sum` would not wait."""
        assert self._summing is not None, "asked after the sum was started"
        return self._summing.work.is_completed()

    def finish_sum(self) -> None:
        """Wait for the sum: of what this rank steps the gradients are complete."""
        assert self._summing is not None, "every bucket is summed in every iteration"
        self._between.finish_sum(self._summing, self._sum)
        self._summing = None

    def start_gather(self, turns: GatherTurns | None = None) -> dist.Work:
        """Start handing on what this rank has stepped, and taking what others have of its range."""
        self._handing_on = self._between.start_handing_on(self._shard, turns)
        return self._handing_on.work

    @property
    def is_gathering(self) -> bool:
        """Whether a gather was started and not finished."""
        return self._handing_on is not None

    def finish_gather(self) -> None:
        """Wait until the range is up to date; does nothing where no gather was started."""
        if self._handing_on is not None:
            self._between.finish_handing_on(self._handing_on, self._shard)
            self._handing_on = None

    def start_fetch(self) -> None:
        """Start making the parameters whole, as the last step made them. Collective."""
        self.finish_gather()
        super().start_fetch()

    def gather_gradients(self) -> None:
        """Make the gradients whole on every rank, until `reset`. Collective; after the step's last pass."""
        self._between.finish_handing_on(self._between.start_handing_on(self._sum), self._sum)
        super().gather_gradients()
