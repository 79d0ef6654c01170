"""The gradient pool: parameters held by several ranks share flat buckets, which are summed as soon as they
are complete.

A parameter's `.grad` is a view into its bucket, so nothing is copied before or after a sum. Behind the
gradients a bucket has one entry per parameter that says whether any rank's backward pass reached it: as in
plain PyTorch, a parameter that a step did not use has no gradient, and optimizers leave it alone (a gradient
of zeros would still decay it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from spindle_cli.program.types import ParameterGroup
from spindle_cli.runtime.communicators import Communicators
from spindle_cli.runtime.transfers import wait_for

if TYPE_CHECKING:
    from torch import Tensor


class Bucket:
    """Parameters of one dtype that are summed in one collective."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], communicator: dist.ProcessGroup | None
    ) -> None:
        first = next(iter(parameters.values()))
        self._parameters = tuple(parameters.values())
        self._communicator = communicator
        self._size = sum(parameter.numel() for parameter in self._parameters)
        self._reached = [False] * len(self._parameters)
        self._work: dist.Work | None = None
        self._flat = torch.zeros(self._size + len(self._parameters), dtype=first.dtype, device=first.device)
        self._views = self._split()
        for position, parameter in enumerate(self._parameters):
            hook = self._note_reached(position)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.reset()

    def start_sum(self) -> None:
        """Start the sum; this rank's share of every gradient is complete."""
        flags = self._flat[self._size :]
        if all(self._reached):
            flags.fill_(1)
        else:
            flags.copy_(torch.tensor(self._reached))
        self._work = dist.all_reduce(self._flat, group=self._communicator, async_op=True)

    def finish(self) -> None:
        """Wait for the sum; parameters that no rank's backward pass reached have no gradient."""
        assert self._work is not None, "every bucket is summed in every iteration"
        wait_for(self._work)
        self._work = None
        if all(self._reached):
            return
        for parameter, count in zip(self._parameters, self._flat[self._size :].tolist(), strict=True):
            if count == 0:
                parameter.grad = None

    def reset(self) -> None:
        """Zero every gradient, in place, for the next iteration."""
        self._flat.zero_()
        self._reached = [False] * len(self._parameters)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def _split(self) -> tuple[Tensor, ...]:
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = torch.split(self._flat[: self._size], sizes)
        return tuple(
            part.view(parameter.shape) for part, parameter in zip(parts, self._parameters, strict=True)
        )

    def _note_reached(self, position: int) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            self._reached[position] = True

        return note


class GradientPool:
    """All trained parameters of this rank: those of other ranks too in buckets, its own alone as they are."""

    def __init__(
        self,
        groups: tuple[ParameterGroup, ...],
        trained: Mapping[str, nn.Parameter],
        communicators: Communicators,
        rank: int,
    ) -> None:
        """`trained`: this rank's trained parameters by canonical name, which is also the groups' key for
        them.
        """
        self._buckets: dict[int, tuple[Bucket, ...]] = {}
        shared: set[str] = set()
        for group in groups:
            if rank in group.devices and len(group.devices) > 1:
                names = [name for name, _ in group.blocks]
                shared.update(names)
                by_dtype: dict[torch.dtype, dict[str, nn.Parameter]] = {}
                for name in names:
                    by_dtype.setdefault(trained[name].dtype, {})[name] = trained[name]
                communicator = communicators.of(group.devices)
                self._buckets[group.index] = tuple(
                    Bucket(parameters, communicator) for parameters in by_dtype.values()
                )
        self._own = tuple(parameter for name, parameter in trained.items() if name not in shared)

    def start_sum(self, group: int) -> None:
        """Start the sum of a parameter group."""
        for bucket in self._buckets[group]:
            bucket.start_sum()

    def finish(self) -> None:
        """Wait for all sums: from here on `.grad` is the gradient of the whole iteration."""
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.finish()

    def reset(self) -> None:
        """Forget all gradients, for the next iteration."""
        for parameter in self._own:
            parameter.grad = None
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.reset()
