"""An op run alone as one device's part of it, between others like it: of its stream it is given the device's
own positions, and hands them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from spindle_cli.operators.sequence.exchange import SequencePart, Shared
from spindle_cli.operators.tensor_group import TensorGroup
from spindle_cli.operators.tensor_parallel import LayerSplit


class OwnPositions:
    """The first device's positions; `inputs`: the op's, of its stream these alone."""

    def __init__(self, split: LayerSplit | None, group: TensorGroup, inputs: Sequence[Tensor]) -> None:
        """`split`: None, or without a sequence, leaves everything whole."""
        sequence = None if split is None else split.sequence
        self._taken = None if sequence is None else sequence.taken
        self._is_shared = sequence is not None
        self.inputs = list(inputs)
        if split is None or sequence is None or self._taken is None:
            return
        self._part = SequencePart(split.degree, sequence.dim, group)
        stream = inputs[self._taken]
        self._length = stream.shape[sequence.dim]
        own = self._part.own(stream.detach())
        self.inputs[self._taken] = own.requires_grad_(stream.requires_grad)

    def given(self, arguments: Sequence[Any]) -> list[Any]:
        """What the op takes, from tensors like `inputs`."""
        given = list(arguments)
        if self._taken is not None:
            given[self._taken] = Shared(given[self._taken], self._length, self._part)
        return given

    def called(self, module: nn.Module) -> nn.Module:
        """The op as a module that takes `inputs`, and gives tensors."""
        return _OnTensors(module, self) if self._is_shared else module


def tensors_of(result: Any) -> Any:
    """What an op gives, with tensors in place of parts of them."""
    if isinstance(result, tuple):
        return tuple(tensors_of(each) for each in result)
    return result.tensor if isinstance(result, Shared) else result


class _OnTensors(nn.Module):
    def __init__(self, module: nn.Module, positions: OwnPositions) -> None:
        super().__init__()
        self.module = module
        self._positions = positions

    def forward(self, *arguments: Any) -> Any:
        return tensors_of(self.module(*self._positions.given(arguments)))
