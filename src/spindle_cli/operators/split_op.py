"""Run an op on parts of its parameters, together with the other devices of a tensor-parallel group.

The parts are plain tensors, and the two sums of a split layer (Megatron's f and g) autograd functions around
the layer's own linear maps. DTensor's `ColwiseParallel` and `RowwiseParallel` come to the same, with one more
sum for each further map that takes the same input and more work of the host for each map.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from spindle_cli.errors import WorkloadError
from spindle_cli.operators.experts.region import ExpertRegion
from spindle_cli.operators.sequence.region import SequenceRun
from spindle_cli.operators.sequence.types import SequenceSplit
from spindle_cli.operators.tensor_group import (
    RandomState,
    SequencePart,
    Shared,
    TensorGroup,
    applied,
    draw_seed,
    seed_generators,
    sum_backward,
    sum_forward,
)
from spindle_cli.operators.tensor_parallel import LayerSplit


@dataclass(frozen=True)
class View:
    """What an op takes for one of its parameters: the leaves that it is joined from along `dim`.

    Attributes:
        counts: whether this device's gradient counts. Of a whole parameter that all devices of a group use
            alike, only the first one's does.
        is_zero: zeros in its place: the bias of a sum that another device adds.
    """

    leaves: tuple[nn.Parameter, ...]
    dim: int = 0
    counts: bool = True
    is_zero: bool = False

    def take(self) -> Tensor:
        """Make the tensor out of the leaves, so that it is differentiable in them."""
        whole = self.leaves[0] if len(self.leaves) == 1 else torch.cat(self.leaves, self.dim)
        if self.counts:
            return whole
        return applied(_Uncounted, whole, self.is_zero)


class PartialOp(nn.Module):
    """An op that takes some of its parameters from leaves; `region`: where it is split over a group."""

    def __init__(
        self, op: nn.Module, views: Mapping[str, View], region: SplitRegion | ExpertRegion | None
    ) -> None:
        """`views`: by the parameters' names in `op`; equal ones are taken once."""
        super().__init__()
        self.op = op
        self.leaves = nn.ParameterList(dict.fromkeys(leaf for view in views.values() for leaf in view.leaves))
        self._views = dict(views)
        self._region = region

    @property
    def by_name(self) -> dict[str, nn.Parameter]:
        """The parameters that are one leaf each, by their names in the op."""
        return {name: view.leaves[0] for name, view in self._views.items() if len(view.leaves) == 1}

    @property
    def taken(self) -> Collection[int]:
        """The arguments that may be a `Shared`."""
        return () if self._region is None else self._region.taken

    def forward(self, *arguments: Tensor | Shared) -> Any:
        """What the op gives on these arguments; a `Shared` where it hands a part of the sequence on."""
        taken: dict[int, Tensor] = {}
        for view in self._views.values():
            if id(view) not in taken:
                taken[id(view)] = view.take()
        tensors = {name: taken[id(view)] for name, view in self._views.items()}
        with nullcontext() if self._region is None else self._region.entered():
            return functional_call(self.op, tensors, arguments, tie_weights=False)


class SplitRegion:
    """The part of an op's layer that the devices of a group share out."""

    def __init__(
        self, op: nn.Module, split: LayerSplit, group: TensorGroup, *, draws_apart: bool = True
    ) -> None:
        """`draws_apart`: inside of its part each device draws random numbers of its own."""
        self._op = op
        self._entries = {name: op.get_submodule(name) for name in split.entered}
        self._exits = {name: op.get_submodule(name) for name in split.summed}
        self._split = split
        self._group = group
        self._draws_apart = draws_apart

    @property
    def taken(self) -> Collection[int]:
        """The op's arguments that may be a `Shared`."""
        return self._split.parts_taken(self._group)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the op inside: what goes into its colwise maps and comes out of its rowwise ones is summed, or
        gathered and scattered where the sequence is shared out.

        Raises:
            WorkloadError: the layer has not called one of these maps.
        """
        sequence = self._split.sequence
        alike = None if sequence is None else sequence.alike
        run = _RegionRun(self._group, self._draws_apart, alike)
        hooks: list[RemovableHandle] = []
        if sequence is not None:
            part = SequencePart(self._split.degree, sequence.dim, self._group)
            run.sequence = SequenceRun(sequence, part)
            hooks += self._sequence_hooks(sequence, run.sequence)
        hooks += [
            *(
                m.register_forward_pre_hook(partial(run.enter, name), with_kwargs=True)
                for name, m in self._entries.items()
            ),
            *(m.register_forward_hook(run.leave, prepend=True) for m in self._exits.values()),
        ]
        try:
            yield
            self._require_called(run)
        finally:
            for hook in hooks:
                hook.remove()
            run.leave_stream()

    def _sequence_hooks(self, sequence: SequenceSplit, run: SequenceRun) -> list[RemovableHandle]:
        layer = self._op.get_submodule(sequence.layer)
        return [
            layer.register_forward_pre_hook(run.begin, with_kwargs=True),
            layer.register_forward_hook(run.end),
            *(
                self._op.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, kwargs, places=places: run.enter(places, args, kwargs), with_kwargs=True
                )
                for name, places in sequence.entries.items()
            ),
        ]

    def _require_called(self, run: _RegionRun) -> None:
        for name, module in {**self._entries, **self._exits}.items():
            if id(module) not in run.called:
                raise WorkloadError(
                    f"tp_plans: the layer does not call {name}, so that it cannot be split",
                    hint="It may use that module's weight itself: call the module, or give it no plan.",
                )


def region_of(
    op: nn.Module, split: LayerSplit, group: TensorGroup, *, draws_apart: bool = True
) -> SplitRegion | ExpertRegion:
    """What of an op the devices of a group share out.

    Args:
        op: that has the names of the split.
        draws_apart: inside of its part each device draws random numbers of its own.
    """
    if split.experts is None:
        return SplitRegion(op, split, group, draws_apart=draws_apart)
    return ExpertRegion(op, split.experts, group, split.degree, draws_apart=draws_apart)


@dataclass
class _RegionRun:
    """One run of an op through its region; `alike`: where the sequence is shared out, the colwise maps that
    take what no device has a part of.
    """

    group: TensorGroup
    draws_apart: bool
    alike: frozenset[str] | None
    sequence: SequenceRun | None = None
    called: set[int] = field(default_factory=set)
    _inputs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _outside: RandomState | None = None

    def enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a colwise map: the gradients that all maps give back for one input are summed once."""
        self.called.add(id(module))
        self._enter_stream()
        if self.alike is not None and name not in self.alike:
            return args, kwargs
        if args:
            return (self._entered(args[0]), *args[1:]), kwargs
        return args, {name: self._entered(value) for name, value in kwargs.items()}

    def leave(self, module: nn.Module, _: object, output: Tensor) -> Tensor:
        """Behind a rowwise map: every device has a summand of the output."""
        self.called.add(id(module))
        self.leave_stream()
        if self.sequence is not None:
            return self.sequence.leave(output)
        return sum_forward(output, self.group)

    def _entered(self, tensor: Tensor) -> Tensor:
        for entered, inside in self._inputs:
            if entered is tensor:
                return inside
        inside = sum_backward(tensor, self.group)
        self._inputs.append((tensor, inside))
        return inside

    def _enter_stream(self) -> None:
        """Draw random numbers of this device's own from here on; the group's stream gives the seed."""
        if self.draws_apart and self._outside is None:
            seed = draw_seed()
            self._outside = RandomState.now(self.group.device)
            seed_generators(seed + self.group.member, self.group.device)

    def leave_stream(self) -> None:
        """Draw from the group's stream again."""
        if self._outside is not None:
            self._outside.restore()
            self._outside = None


class _Uncounted(torch.autograd.Function):
    """A parameter, or zeros like it, without a gradient. Whatever is computed from it takes one all the same,
    so that all devices of a group take part in the same sums.
    """

    @staticmethod
    def forward(_: Any, tensor: Tensor, is_zero: bool) -> Tensor:
        return torch.zeros_like(tensor) if is_zero else tensor.view_as(tensor)

    @staticmethod
    def backward(_: Any, *__: Tensor) -> tuple[None, None]:
        return None, None
