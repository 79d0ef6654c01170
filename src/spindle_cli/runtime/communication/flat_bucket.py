"""Parameters in one flat tensor of which each rank has a range alone: whole while ops use them.

Whole parameters are gathered for the ops that use them and given up behind them (ZeRO-3, Rajbhandari et al.
2020). A tensor that is given up keeps its storage, without memory: what autograd has saved of it is there
again when the parameters are (as FSDP does it, Zhao et al. 2023). The memory that parameters are gathered
into is always the same (`gather_memory.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from spindle_cli.files.sharding import Sharding
from spindle_cli.runtime.communication.collectives import Members, start_gather
from spindle_cli.runtime.communication.replica_groups.group_ranges import GroupRange, ReplicaGroups
from spindle_cli.runtime.communication.transfers import wait_for
from spindle_cli.runtime.memory.gather_memory import GatherMemory
from spindle_cli.runtime.memory.given_up import give_up_memory, take_back_memory
from spindle_cli.runtime.update.owned_ranges import FlatLayout, OwnedRange
from spindle_cli.workload.initial.types import OwnValues

if TYPE_CHECKING:
    from torch import Tensor

# Of a parameter: its name, elements [first, last) of it, and where they begin in a rank's range.
Elements = tuple[str, tuple[int, int], int]


class FlatBucket:
    """Parameters of one dtype. With `Sharding.GRADIENTS` they stay whole; else every rank keeps a
    range of them, each of a replica group where there are several.

    Attributes:
        is_fetched: whether passes make them whole. `is_kept`: they stay so from a slice's forward pass to its
            backward pass.
        parameters: as the modules have them; to be read while they are there alone.
        keys: their names.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        members: Members,
        sharding: Sharding,
        shards: MutableMapping[str, OwnValues] | None = None,
        replica_groups: ReplicaGroups | None = None,
    ) -> None:
        """`members`: with the communicator for what is gathered inside of passes. `shards`: of parameters
        without memory, what this rank has, which the bucket takes away. `replica_groups`: where there are
        several, one of which the members are.
        """
        first = next(iter(parameters.values()))
        self.parameters = tuple(parameters.values())
        self.keys = tuple(parameters)
        self.is_fetched = sharding.is_fetched
        self.is_kept = sharding is Sharding.KEPT
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self._layout = FlatLayout.of(sizes, first.itemsize, members.count, members.weights)
        self._members = members.with_cuts(self._layout.cuts)
        self._group_ranges: tuple[GroupRange, ...] = (
            () if replica_groups is None else replica_groups.ranges(sizes, first.itemsize)
        )
        self._values = torch.empty(self._layout.size, dtype=first.dtype, device=first.device)
        self._shard = self._take_parameters(parameters, {} if shards is None else shards)
        self._place: tuple[GatherMemory, int] | None = None
        self._has_place = False
        self._users = 0  # slices that keep it
        self._work: dist.Work | None = None

    def _take_parameters(
        self, parameters: Mapping[str, nn.Parameter], shards: MutableMapping[str, OwnValues]
    ) -> Tensor:
        """Let them be views of the flat tensor; gives this rank's range of it, which is that tensor's own
        where it stays whole.
        """
        if self.is_fetched:
            first, last = self._layout.range_of(self._members.position)
            kept = torch.zeros(last - first, dtype=self._values.dtype, device=self._values.device)
            taken = {name: shards.pop(name) for name in parameters if name in shards}
            for name, elements, begin in self._kept_elements():
                there = kept[begin : begin + elements[1] - elements[0]]
                if name in taken:
                    assert taken[name].part.elements == elements, "a rank keeps what it owns"
                    there.copy_(taken[name].values)
                else:
                    there.copy_(parameters[name].detach().reshape(-1)[slice(*elements)])
        else:
            self._values.zero_()
        for (begin, end), parameter in zip(self._layout.spans.values(), self.parameters, strict=True):
            moved = self._values[begin:end].view(parameter.shape)
            if not self.is_fetched:
                moved.copy_(parameter.detach())
            parameter.data = moved
        if not self.is_fetched:
            return self._members.range_in(self._values)
        give_up_memory(self._values)
        return kept

    def _kept_elements(self) -> Iterator[Elements]:
        """The elements in this rank's range, parameter by parameter."""
        return self._elements_in([self._layout.range_of(self._members.position)])

    def _elements_in(self, ranges: Iterable[tuple[int, int]]) -> Iterator[Elements]:
        """The elements in ranges of the flat tensor, which are in this rank's, parameter by parameter."""
        begin, _ = self._layout.range_of(self._members.position)
        for low, high in ranges:
            for name, (first, last) in self._layout.spans.items():
                start, end = max(first, low), min(last, high)
                if start < end:
                    yield name, (start - first, end - first), start - begin

    @property
    def own_ranges(self) -> tuple[OwnedRange, ...]:
        """What this rank has of the parameters; where there are several replica groups, in ranges that ranks
        of all replica groups have alike.
        """
        low, high = self._layout.range_of(self._members.position)
        ranges = [
            (group_range.first, group_range.last)
            for group_range in self._group_ranges
            if low <= group_range.first < high
        ]
        return self._ranges_of(self._elements_in(ranges) if self._group_ranges else self._kept_elements())

    def _ranges_of(self, elements_of: Iterable[Elements]) -> tuple[OwnedRange, ...]:
        return tuple(
            OwnedRange(
                name,
                elements,
                nn.Parameter(
                    self._shard[begin : begin + elements[1] - elements[0]],
                    requires_grad=self.parameters[0].requires_grad,
                ),
            )
            for name, elements, begin in elements_of
        )

    @property
    def gathered_bytes(self) -> int:
        """The bytes that the parameters take while they are whole."""
        return self._layout.size * self._values.itemsize

    def gather_into(self, memory: GatherMemory, begin: int) -> None:
        """From here on parameters that are fetched lie there, unless somebody else does just then."""
        self._place = memory, begin

    def start_fetch(self) -> None:
        """Start making the parameters whole. Collective."""
        memory, begin = self._place or (None, 0)
        self._has_place = memory is not None and memory.lend(self._values, begin)
        if not self._has_place:
            take_back_memory(self._values)
        self._members.range_in(self._values).copy_(self._shard)
        self._work = start_gather(self._values, self._members)

    def start_keeping(self) -> None:
        """Start making the parameters whole, unless another slice keeps them already. Collective."""
        self._users += 1
        if self._users == 1:
            self.start_fetch()

    def end_keeping(self) -> None:
        """A slice needs the parameters no more; the last one gives them up."""
        self._users -= 1
        if self._users == 0:
            self.give_up()

    def finish_fetch(self) -> None:
        """Wait until the parameters are there."""
        if self._work is None:
            assert self._users > 1, "a fetch was started, or another slice keeps them"
            return
        wait_for(self._work)
        self._work = None

    def give_up(self) -> None:
        """Free the memory of the whole parameters, until they are fetched again."""
        if self._has_place and self._place is not None:
            memory, begin = self._place
            memory.take_back(self._values, begin)
            self._has_place = False
        else:
            give_up_memory(self._values)


class FrozenBucket(FlatBucket):
    """Parameters that are not trained."""
