"""Run an op's layer on this device's samples, and its own experts on those of all; and what the devices of a
group exchange around the experts that they share out.

As in GShard (Lepikhin et al., arXiv 2006.16668, section 3.3): what the experts take of a device's own samples
goes to the devices that have these experts, by an all-to-all, and what they give comes back by another;
backward it is the other way round. How much that is follows from the experts' capacity alone, so that no
device has to wait to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from spindle_cli.errors import WorkloadError
from spindle_cli.operators.experts.types import ExpertSplit, expert_sizes
from spindle_cli.operators.sequence.region import argument, with_argument
from spindle_cli.operators.tensor_group import (
    RandomState,
    SequencePart,
    Shared,
    TensorGroup,
    applied,
    draw_seed,
    part_sizes,
    seed_generators,
    sum_backward,
)

# Of what experts take and give.
SAMPLES_DIM, EXPERTS_DIM = 0, 1


@dataclass(frozen=True, eq=False)
class SamplePart(SequencePart):
    """The samples that one of `degree` devices has of a batch share, which lie along dimension `dim`.

    Of fewer samples than devices the last one is computed again by those that would have none, and what
    they find is dropped: nothing has to run on no samples.
    """

    def part_of(self, whole: Tensor, *, is_gradient: bool = False) -> Tensor:
        """Gives this device's samples of a whole batch, in memory of their own."""
        missing = self.degree - whole.shape[self.dim]
        if missing > 0:
            more = whole.narrow(self.dim, whole.shape[self.dim] - 1, 1)
            again = torch.zeros_like(more) if is_gradient else more
            whole = torch.cat([whole, *[again] * missing], self.dim)
        return super().part_of(whole)

    def join(self, tensor: Tensor, size: int, *, is_gradient: bool) -> Tensor:
        """All `size` samples of what each device has its own of."""
        whole = super().join(tensor, max(size, self.degree), is_gradient=is_gradient)
        return whole.narrow(self.dim, 0, size)

    def sizes(self, size: int) -> tuple[int, ...]:
        """How many of `size` samples each device computes."""
        return part_sizes(max(size, self.degree), self.degree)


@dataclass(frozen=True)
class Dispatch:
    """How many samples, and how many experts, each device of a group has."""

    group: TensorGroup
    samples: tuple[int, ...]
    experts: tuple[int, ...]

    def to_experts(self, tensor: Tensor, *, is_gradient: bool = False) -> Tensor:
        """Exchange [own samples, all experts, ...], which each device has, for [all samples, own experts,
        ...].
        """
        return self.group.exchange(
            tensor, (EXPERTS_DIM, self.experts), (SAMPLES_DIM, self.samples), is_gradient=is_gradient
        )

    def to_samples(self, tensor: Tensor, *, is_gradient: bool = False) -> Tensor:
        """Exchange back what `to_experts` has exchanged."""
        return self.group.exchange(
            tensor, (SAMPLES_DIM, self.samples), (EXPERTS_DIM, self.experts), is_gradient=is_gradient
        )


def dispatched(tensor: Tensor, dispatch: Dispatch) -> Tensor:
    """Run `Dispatch.to_experts` so that it is differentiable."""
    return applied(_Exchanged, tensor, dispatch.to_experts, dispatch.to_samples)


def combined(tensor: Tensor, dispatch: Dispatch) -> Tensor:
    """Run `Dispatch.to_samples` so that it is differentiable."""
    return applied(_Exchanged, tensor, dispatch.to_samples, dispatch.to_experts)


class _Exchanged(torch.autograd.Function):
    """What an exchange gives; its gradient goes the way back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0], is_gradient=True), None, None


class ExpertRegion:
    """The layer of an op whose experts the devices of a group share out."""

    def __init__(
        self, op: nn.Module, split: ExpertSplit, group: TensorGroup, degree: int, *, draws_apart: bool = True
    ) -> None:
        """`draws_apart`: inside of the layer each device draws random numbers of its own."""
        self._op = op
        self._split = split
        self._group = group
        self._degree = degree
        self._draws_apart = draws_apart

    @property
    def taken(self) -> Collection[int]:
        """The op's arguments that may be a `Shared`."""
        return self._split.taken

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the op runs as one device of the group does.

        Raises:
            WorkloadError: the layer has not called its experts.
        """
        run = _LayerRun(self._split, self._group, self._degree, self._draws_apart)
        layer = self._op.get_submodule(self._split.layer)
        hooks: list[RemovableHandle] = [
            layer.register_forward_pre_hook(run.begin, with_kwargs=True),
            layer.register_forward_hook(run.end),
        ]
        for name, count in self._split.modules.items():
            experts = self._op.get_submodule(name)
            dispatch = partial(run.dispatch, name, count)
            hooks.append(experts.register_forward_pre_hook(dispatch))
            hooks.append(experts.register_forward_hook(partial(run.combine, name, count)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            run.leave_stream()
        run.require_called()


@dataclass
class _LayerRun:
    """One run of a layer; its methods are hooks of the layer's modules."""

    split: ExpertSplit
    group: TensorGroup
    degree: int
    draws_apart: bool
    size: int = 0
    called: set[str] = field(default_factory=set)
    _outside: RandomState | None = None

    def begin(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the layer: of its arguments, this device's samples."""
        for place, dim in self.split.arguments.items():
            given = argument(place, args, kwargs)
            shared = given if isinstance(given, Shared) else self._part(dim).cut(given)
            self.size = shared.length
            args, kwargs = with_argument(place, shared.tensor, args, kwargs)
        for place in self.split.shared:
            summed = sum_backward(argument(place, args, kwargs), self.group)
            args, kwargs = with_argument(place, summed, args, kwargs)
        if self.draws_apart:
            seed = draw_seed()
            self._outside = RandomState.now(self.group.device)
            seed_generators(seed + self.group.member, self.group.device)
        return args, kwargs

    def dispatch(self, name: str, count: int, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before the experts: what their own take of all samples."""
        self.called.add(name)
        return (dispatched(args[0], self._dispatch(count)), *args[1:])

    def combine(self, _: str, count: int, __: nn.Module, ___: object, output: Tensor) -> Tensor:
        """Behind the experts: what all give for this device's samples."""
        return combined(output, self._dispatch(count))

    def end(self, _: nn.Module, __: object, result: Any) -> Any:
        """Behind the layer: a part is handed on as one, or joined, as the op around it takes it."""
        self.leave_stream()
        if None in self.split.results:
            return self._handed(result, None)
        listed = list(result)
        for place in self.split.results:
            assert place is not None, "a layer gives one tensor or several"
            listed[place] = self._handed(result[place], place)
        return type(result)(listed)

    def leave_stream(self) -> None:
        """Draw from the group's stream again."""
        if self._outside is not None:
            self._outside.restore()
            self._outside = None

    def require_called(self) -> None:
        """Raises WorkloadError: some experts were not, for which other devices wait."""
        for name in self.split.modules.keys() - self.called:
            raise WorkloadError(
                f"tp_plans: the layer does not call {name}, so that its experts cannot be shared out",
                hint="It may use that module's parameters itself: call the module, or give it no plan.",
            )

    def _handed(self, part: Tensor, place: int | None) -> Tensor | Shared:
        shared = Shared(part, self.size, self._part(self.split.results[place]))
        return shared if place in self.split.kept else shared.whole()

    def _part(self, dim: int) -> SamplePart:
        return SamplePart(self.degree, dim, self.group)

    def _dispatch(self, count: int) -> Dispatch:
        samples = self._part(0).sizes(self.size)
        return Dispatch(self.group, samples, expert_sizes(count, self.degree))
