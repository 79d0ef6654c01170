"""Flat buckets of trained parameters whose gradients are whole while a backward pass makes them alone: summed
in it, each rank adding its range of the sum to what it keeps (ZeRO-2 and ZeRO-3, Rajbhandari et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from spindle_cli.files.sharding import Sharding
from spindle_cli.runtime.backends.gather_turns import GatherTurns
from spindle_cli.runtime.communication.collectives import Members, Scatter, start_gather, start_scatter
from spindle_cli.runtime.communication.flat_bucket import Elements, FlatBucket
from spindle_cli.runtime.communication.replica_groups.group_ranges import ReplicaGroups
from spindle_cli.runtime.communication.transfers import wait_for
from spindle_cli.runtime.memory.given_up import give_up_memory, take_back_memory
from spindle_cli.training.precision import gradient_dtype
from spindle_cli.workload.initial.types import OwnValues


class PassBucket(FlatBucket):
    """Trained parameters of one dtype, of whose gradients every rank keeps a range.

    Attributes:
        owned_ranges: what this rank steps.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        members: Members,
        sharding: Sharding,
        between_steps: dist.ProcessGroup | None,
        shards: MutableMapping[str, OwnValues] | None = None,
        replica_groups: ReplicaGroups | None = None,
    ) -> None:
        """`members`: with the communicator for what is gathered and summed inside of passes;
        `between_steps`: what new values of parameters that stay whole are gathered over; `shards` and
        `replica_groups`: see `FlatBucket`.
        """
        super().__init__(parameters, members, sharding, shards, replica_groups)
        first = self.parameters[0]
        self._between_steps = replace(self._members, communicator=between_steps)
        self._sum = torch.zeros_like(self._shard, dtype=gradient_dtype(first))
        self._gradients = torch.empty(self._layout.size, dtype=self._sum.dtype, device=first.device)
        self._views = tuple(
            self._gradients[begin:end].view(parameter.shape)
            for (begin, end), parameter in zip(self._layout.spans.values(), self.parameters, strict=True)
        )
        stepped = list(self._stepped_elements())
        self.owned_ranges = self._ranges_of(stepped)
        self._own_gradients = tuple(
            (name, self._sum[begin : begin + elements[1] - elements[0]]) for name, elements, begin in stepped
        )
        for owned in self.owned_ranges:
            if self._sum.dtype != owned.tensor.dtype:
                owned.tensor.grad_dtype = self._sum.dtype
        self._scatter: Scatter | None = None
        self._reached: tuple[bool, ...] = ()
        give_up_memory(self._gradients)

    def _stepped_elements(self) -> Iterator[Elements]:
        """The elements, among those that this rank keeps, that its optimizer steps."""
        return self._kept_elements()

    def open_gradients(self) -> None:
        """Give the parameters whole gradients of zeros, for a backward pass to add to."""
        take_back_memory(self._gradients)
        self._gradients.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def start_scatter(self) -> None:
        """Start the sum of the whole gradients over all ranks. Collective."""
        for parameter in self.parameters:
            parameter.grad = None
        self._scatter = start_scatter(self._gradients, self._members)

    def finish_scatter(self) -> None:
        """Wait for the sum, and add this rank's range of it to what it keeps."""
        assert self._scatter is not None, "a scatter was started"
        self._scatter.finish()
        self._scatter = None
        self._sum.add_(self._members.range_in(self._gradients))
        give_up_memory(self._gradients)

    def hand_out(self, reached: Sequence[bool]) -> None:
        """Give each owned range its gradient, and none where no rank's backward pass has reached the
        parameter.
        """
        self._reached = tuple(reached)
        is_reached = dict(zip(self.keys, reached, strict=True))
        for owned, (name, gradient) in zip(self.owned_ranges, self._own_gradients, strict=True):
            owned.tensor.grad = gradient if is_reached[name] else None

    def reset(self) -> None:
        """Forget the gradients, for the next iteration."""
        self._sum.zero_()
        for parameter in self.parameters:
            parameter.grad = None
        give_up_memory(self._gradients)

    def start_gather(self, turns: GatherTurns | None = None) -> dist.Work:
        """Start handing on this rank's range of parameters that stay whole, and taking the others'."""
        assert not self.is_fetched, "what is fetched is gathered for each pass"
        self._work = start_gather(self._values, self._between_steps, turns)
        return self._work

    @property
    def is_gathering(self) -> bool:
        """Whether a gather was started and not finished."""
        return not self.is_fetched and self._work is not None

    def finish_gather(self) -> None:
        """Wait until the parameters are whole; does nothing where no gather was started."""
        if self.is_gathering:
            self.finish_fetch()

    def gather_gradients(self) -> None:
        """Make the gradients whole on every rank, until `reset`. Collective; after the step's last pass."""
        self.open_gradients()
        self._members.range_in(self._gradients).copy_(self._sum)
        wait_for(start_gather(self._gradients, self._members))
        for parameter, is_reached in zip(self.parameters, self._reached, strict=True):
            if not is_reached:
                parameter.grad = None
