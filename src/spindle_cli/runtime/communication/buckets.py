"""Flat buckets: parameters of the same ranks whose gradients are summed in one collective.

A parameter's `.grad` is a view into its bucket, so nothing is copied before or after a sum. As in plain
PyTorch, a parameter that no rank's backward pass reached has no gradient, and optimizers leave it alone (a
gradient of zeros would still decay it); so a sum comes with a flag for each parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from spindle_cli.runtime.backends.gather_turns import GatherTurns
from spindle_cli.runtime.communication.collectives import (
    Members,
    Scatter,
    scatter_buffer_bytes,
    start_gather,
    start_scatter,
)
from spindle_cli.runtime.communication.pass_bucket import PassBucket
from spindle_cli.runtime.communication.reached import Reached, Steady
from spindle_cli.runtime.communication.transfers import wait_for
from spindle_cli.runtime.update.owned_ranges import FlatLayout, OwnedRange
from spindle_cli.training.precision import gradient_dtype

if TYPE_CHECKING:
    from torch import Tensor


class Bucket:
    """Parameters of one dtype that every rank steps whole: an all-reduce, the flags behind the gradients."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], members: Members, steady: Steady | None = None
    ) -> None:
        first = next(iter(parameters.values()))
        self._parameters = tuple(parameters.values())
        self._communicator = members.communicator
        self.owned_ranges = tuple(
            OwnedRange(name, None, parameter, counted=members.position == 0)
            for name, parameter in parameters.items()
        )
        self._size = sum(parameter.numel() for parameter in self._parameters)
        self._reached = Reached(self._parameters, steady)
        self.turn_to = self._reached.turn_to
        self._work: dist.Work | None = None
        self._flat = torch.zeros(
            self._size + self._reached.size, dtype=gradient_dtype(first), device=first.device
        )
        self._views = self._split()
        self.reset()

    @property
    def buffer_bytes(self) -> int:
        """Bytes that a sum takes while it is under way."""
        return 0

    def start_sum(self) -> dist.Work:
        """Start the sum; this rank's share of every gradient is complete."""
        self._reached.write_into(self._flat[self._size :])
        work: dist.Work = dist.all_reduce(self._flat, group=self._communicator, async_op=True)
        self._work = work
        return work

    def is_summed(self) -> bool:
        """Whether `finish_sum` would not wait."""
        assert self._work is not None, "asked after the sum was started"
        return self._work.is_completed()

    def finish_sum(self) -> None:
        """Wait for the sum; parameters that no rank's backward pass reached have no gradient."""
        assert self._work is not None, "every bucket is summed in every iteration"
        wait_for(self._work)
        self._work = None
        reached = self._reached.outcome(self._flat[self._size :])
        for parameter, is_reached in zip(self._parameters, reached, strict=True):
            if not is_reached:
                parameter.grad = None

    def leave_out(self) -> None:
        """Nothing of it was run in this iteration: none of its parameters has a gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def reset(self) -> None:
        """Zero every gradient, in place, for the next iteration."""
        self._flat.zero_()
        self._reached.reset()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def _split(self) -> tuple[Tensor, ...]:
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = torch.split(self._flat[: self._size], sizes)
        return tuple(
            part.view(parameter.shape) for part, parameter in zip(parts, self._parameters, strict=True)
        )


class ShardedBucket:
    """Parameters of one dtype of which every rank steps a range: a reduce-scatter of the gradients,
    and, after the step, an all-gather of the parameters.

    The parameters' own memory moves into one flat tensor beside that of the gradients. Flags are summed by
    `Flags`, for all buckets of the same ranks at once.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], members: Members) -> None:
        first = next(iter(parameters.values()))
        self.parameters = tuple(parameters.values())
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        layout = FlatLayout.of(sizes, first.itemsize, members.count, members.weights)
        self._members = members.with_cuts(layout.cuts)
        self._values = torch.zeros(layout.size, dtype=first.dtype, device=first.device)
        self._gradients = torch.zeros_like(self._values, dtype=gradient_dtype(first))
        self._views = tuple(
            self._gradients[begin:end].view(parameter.shape)
            for (begin, end), parameter in zip(layout.spans.values(), self.parameters, strict=True)
        )
        for (begin, end), parameter in zip(layout.spans.values(), self.parameters, strict=True):
            moved = self._values[begin:end].view(parameter.shape)
            moved.copy_(parameter.detach())
            parameter.data = moved
        self._owned = self._owned_views(parameters, layout)
        self._scatter: Scatter | None = None
        self._gather: dist.Work | None = None
        self.reset()

    @property
    def owned_ranges(self) -> tuple[OwnedRange, ...]:
        """The ranges of parameters that this rank's optimizer steps."""
        return tuple(view.owned for view in self._owned)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that a sum takes while it is under way."""
        return scatter_buffer_bytes(self._gradients, self._members)

    def start_sum(self) -> dist.Work:
        """Start the sum; this rank's share of every gradient is complete."""
        self._scatter = start_scatter(self._gradients, self._members)
        return self._scatter.work

    def is_summed(self) -> bool:
        """Whether `finish_sum` would not wait."""
        assert self._scatter is not None, "asked after the sum was started"
        return self._scatter.is_done()

    def finish_sum(self) -> None:
        """Wait for the sum: this rank's range of the gradients is complete."""
        assert self._scatter is not None, "every bucket is summed in every iteration"
        self._scatter.finish()
        self._scatter = None

    def hand_out(self, reached: Sequence[bool]) -> None:
        """Give each owned range its gradient, and none to the parameters that no rank's backward pass has
        reached.
        """
        for view in self._owned:
            view.owned.tensor.grad = view.gradient
        for position, parameter in enumerate(self.parameters):
            if not reached[position]:
                parameter.grad = None
        for view in self._owned:
            if not reached[view.position]:
                view.owned.tensor.grad = None

    def reset(self) -> None:
        """Zero every gradient, in place, for the next iteration."""
        self._gradients.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def start_gather(self, turns: GatherTurns | None = None) -> dist.Work:
        """Start handing on this rank's range of the parameters, and taking the others'."""
        self._gather = start_gather(self._values, self._members, turns)
        return self._gather

    @property
    def is_gathering(self) -> bool:
        """Whether a gather was started and not finished."""
        return self._gather is not None

    def finish_gather(self) -> None:
        """Wait until the parameters are whole; does nothing where no gather was started."""
        if self._gather is not None:
            wait_for(self._gather)
            self._gather = None

    def gather_gradients(self) -> None:
        """Make the gradients whole on every rank. Collective; after the sum, before the next iteration."""
        wait_for(start_gather(self._gradients, self._members))

    def _owned_views(
        self, parameters: Mapping[str, nn.Parameter], layout: FlatLayout
    ) -> tuple[_OwnedView, ...]:
        """This rank's owned ranges; one that is a whole parameter is that itself."""
        position_of = {name: position for position, name in enumerate(parameters)}
        views: list[_OwnedView] = []
        for name, begin, end in layout.owned(self._members.position):
            start = layout.spans[name][0]
            position = position_of[name]
            if end - begin == parameters[name].numel():
                views.append(
                    _OwnedView(OwnedRange(name, None, parameters[name]), self._views[position], position)
                )
                continue
            tensor = nn.Parameter(self._values[start + begin : start + end])
            gradient = self._gradients[start + begin : start + end]
            if gradient.dtype != tensor.dtype:
                tensor.grad_dtype = gradient.dtype
            views.append(_OwnedView(OwnedRange(name, (begin, end), tensor), gradient, position))
        return tuple(views)


@dataclass(frozen=True)
class _OwnedView:
    """An owned range, its place among the gradients, and the position of its parameter in the bucket."""

    owned: OwnedRange
    gradient: Tensor
    position: int


class Flags:
    """Says which parameters of several buckets of the same ranks any rank's backward pass has reached."""

    def __init__(
        self,
        buckets: Sequence[ShardedBucket | PassBucket],
        communicator: dist.ProcessGroup | None,
        steady: Steady | None = None,
    ) -> None:
        self.buckets = tuple(buckets)
        self._communicator = communicator
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        self._reached = Reached(parameters, steady)
        self.turn_to = self._reached.turn_to
        self._outcome: Sequence[bool] = ()
        self._flags = torch.zeros(self._reached.size, dtype=torch.uint8, device=parameters[0].device)
        self._work: dist.Work | None = None

    def start(self, summed: Collection[object]) -> None:
        """Start their way to the other ranks; this rank's share of all the buckets is complete. `summed`: the
        buckets that are summed in this iteration.
        """
        trained = [bucket in summed for bucket in self.buckets for _ in bucket.parameters]
        self._reached.write_into(self._flags, trained)
        self._work = dist.all_reduce(
            self._flags, op=dist.ReduceOp.MAX, group=self._communicator, async_op=True
        )

    def finish(self, summed: Collection[object]) -> None:
        """Wait for the other ranks' flags, and hand out the gradients accordingly; again where they were.

        `summed`: the buckets that were summed in this iteration; where there are none, nothing was started.
        The parameters of the others have no gradient.
        """
        if self._work is not None:
            wait_for(self._work)
            self._work = None
            self._outcome = self._reached.outcome(self._flags)
        first = 0
        for bucket in self.buckets:
            last = first + len(bucket.parameters)
            bucket.hand_out(self._outcome[first:last] if bucket in summed else [False] * (last - first))
            first = last

    def reset(self) -> None:
        """Forget which parameters were reached, for the next iteration."""
        self._reached.reset()
