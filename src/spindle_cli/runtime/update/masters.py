"""Masters: float32 copies of what a rank steps, where parameters are held in fewer bits.

An update is often smaller than the last bit of a bfloat16 number. So the optimizer steps the masters, and
the parameters are the masters rounded. Only a piece's owner has its master.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from spindle_cli.runtime.update.pieces import Piece

# A checkpoint's key for them, beside those of the optimizer's state.
MASTER_KEY = "master"


class Masters:
    """The masters of some pieces. `pieces`: the same pieces with the masters as tensors."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._held = tuple(pieces)
        self.pieces = tuple(
            replace(piece, tensor=nn.Parameter(piece.tensor.detach().to(torch.float32, copy=True)))
            for piece in pieces
        )

    def take_parameters(self) -> None:
        """Start again from the parameters as they are."""
        _copy_all(self._values(self.pieces), self._values(self._held))

    def take_gradients(self) -> None:
        """Give each master the gradient that its piece has, or none."""
        copies: list[Tensor] = []
        gradients: list[Tensor] = []
        for piece, master in zip(self._held, self.pieces, strict=True):
            gradient = piece.tensor.grad
            if gradient is None or gradient.dtype == torch.float32:
                master.tensor.grad = gradient
            else:
                master.tensor.grad = torch.empty_like(gradient, dtype=torch.float32)
                copies.append(master.tensor.grad)
                gradients.append(gradient)
        _copy_all(copies, gradients)

    def hand_back(self) -> None:
        """Round the masters into the parameters, and forget their gradients."""
        _copy_all(self._values(self._held), self._values(self.pieces))
        for master in self.pieces:
            master.tensor.grad = None

    @staticmethod
    def _values(pieces: Sequence[Piece]) -> list[Tensor]:
        return [piece.tensor.detach() for piece in pieces]


def _copy_all(to: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into tensors of other dtypes, by as few kernels as may be."""
    if to:  # torch takes no empty lists
        torch._foreach_copy_(to, values)
