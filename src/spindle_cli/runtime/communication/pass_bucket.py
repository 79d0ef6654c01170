"""Flat buckets of which each rank has a range alone: gradients, or parameters too, are whole for a while.

Whole parameters are gathered for the ops that use them and given up behind them; whole gradients are made in
a backward pass, summed in it, and each rank adds its range of the sum to what it keeps (ZeRO-2 and ZeRO-3,
Rajbhandari et al. 2020). A tensor that is given up keeps its storage, without memory: what autograd has saved
of it is there again when the parameters are (as FSDP does it, Zhao et al. 2023). The memory that parameters
are gathered into is always the same (`gather_memory.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from spindle_cli.files.sharding import Sharding
from spindle_cli.runtime.communication.collectives import Members, Scatter, start_gather, start_scatter
from spindle_cli.runtime.communication.transfers import wait_for
from spindle_cli.runtime.memory.gather_memory import GatherMemory
from spindle_cli.runtime.memory.given_up import give_up_memory, take_back_memory
from spindle_cli.runtime.update.owned_ranges import FlatLayout, OwnedRange
from spindle_cli.workload.initial.own import OwnValues
from spindle_cli.workload.training.precision import gradient_dtype

if TYPE_CHECKING:
    from torch import Tensor


class PassBucket:
    """Parameters of one dtype of which every rank keeps an equal range of the gradients, and with
    `Sharding.PARAMETERS` of the parameters.

    Attributes:
        is_fetched: of the parameters too. `is_kept`: they stay whole from a slice's forward pass to its
            backward pass.
        parameters: as the modules have them; to be read while they are there alone.
        owned_ranges: what this rank steps.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        members: Members,
        sharding: Sharding,
        between_steps: dist.ProcessGroup | None,
        own: MutableMapping[str, OwnValues] | None = None,
    ) -> None:
        """`members`: with the communicator for what is gathered and summed inside of passes;
        `between_steps`: what new values of parameters that stay whole are gathered over; `own`: of
        parameters without memory, what this rank has, which the bucket takes away.
        """
        first = next(iter(parameters.values()))
        self.parameters = tuple(parameters.values())
        self.keys = tuple(parameters)
        self.is_fetched = sharding.is_fetched
        self.is_kept = sharding is Sharding.KEPT
        self._members = members
        self._between_steps = Members(members.count, members.position, between_steps)
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self._layout = FlatLayout.of(sizes, first.itemsize, members.count)
        self._values = torch.empty(self._layout.size, dtype=first.dtype, device=first.device)
        self._own = self._take_parameters(parameters, {} if own is None else own)
        self._sum = torch.zeros_like(self._own, dtype=gradient_dtype(first))
        self._gradients = torch.empty(self._layout.size, dtype=self._sum.dtype, device=first.device)
        self._views = tuple(
            self._gradients[begin:end].view(parameter.shape)
            for (begin, end), parameter in zip(self._layout.spans.values(), self.parameters, strict=True)
        )
        self._owned = tuple(self._own_parts())
        self.owned_ranges = tuple(owned for owned, *_ in self._owned)
        self._place: tuple[GatherMemory, int] | None = None
        self._has_place = False
        self._users = 0  # slices that keep it
        self._work: dist.Work | None = None
        self._scatter: Scatter | None = None
        self._reached: tuple[bool, ...] = ()
        give_up_memory(self._gradients)

    def _take_parameters(
        self, parameters: Mapping[str, nn.Parameter], own: MutableMapping[str, OwnValues]
    ) -> Tensor:
        """Let them be views of the flat tensor; gives this rank's range of it, which is that tensor's own
        where it stays whole.
        """
        if self.is_fetched:
            kept = torch.zeros(self._layout.range_size, dtype=self._values.dtype, device=self._values.device)
            low, _ = self._layout.range_of(self._members.position)
            taken = {name: own.pop(name) for name in parameters if name in own}
            for name, begin, end in self._layout.owned(self._members.position):
                start = self._layout.spans[name][0] - low
                there = kept[start + begin : start + end]
                if name in taken:
                    assert taken[name].part.elements == (begin, end), "a rank keeps what it owns"
                    there.copy_(taken[name].values)
                else:
                    there.copy_(parameters[name].detach().reshape(-1)[begin:end])
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

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all parameters, whole."""
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
        self._members.range_in(self._values).copy_(self._own)
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
        """No op uses the parameters for now."""
        if self._has_place and self._place is not None:
            memory, begin = self._place
            memory.take_back(self._values, begin)
            self._has_place = False
        else:
            give_up_memory(self._values)

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
        for owned, gradient, position in self._owned:
            owned.tensor.grad = gradient if reached[position] else None

    def reset(self) -> None:
        """Forget the gradients, for the next iteration."""
        self._sum.zero_()
        for parameter in self.parameters:
            parameter.grad = None
        give_up_memory(self._gradients)

    def start_gather(self) -> dist.Work:
        """Start handing on this rank's range of parameters that stay whole, and taking the others'."""
        assert not self.is_fetched, "what is fetched is gathered for each pass"
        self._work = start_gather(self._values, self._between_steps)
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

    def _own_parts(self) -> list[tuple[OwnedRange, Tensor, int]]:
        """This rank's owned ranges, their gradients, and the positions of their parameters."""
        position_of = {name: position for position, name in enumerate(self.keys)}
        low, _ = self._layout.range_of(self._members.position)
        found = []
        for name, begin, end in self._layout.owned(self._members.position):
            start = self._layout.spans[name][0] - low
            tensor = nn.Parameter(self._own[start + begin : start + end])
            gradient = self._sum[start + begin : start + end]
            if gradient.dtype != tensor.dtype:
                tensor.grad_dtype = gradient.dtype
            found.append((OwnedRange(name, (begin, end), tensor), gradient, position_of[name]))
        return found
