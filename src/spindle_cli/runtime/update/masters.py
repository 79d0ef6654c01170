"""Masters: float32 copies of what a rank steps, where parameters are held in fewer bits.

An update is often smaller than the last bit of a bfloat16 number. So the optimizer steps the masters, and
the parameters are the masters rounded. Only a piece's owner has its master.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

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
        for piece, master in zip(self._held, self.pieces, strict=True):
            master.tensor.detach().copy_(piece.tensor.detach())

    def take_gradients(self) -> None:
        """Give each master the gradient that its piece has, or none."""
        for piece, master in zip(self._held, self.pieces, strict=True):
            gradient = piece.tensor.grad
            master.tensor.grad = None if gradient is None else gradient.to(torch.float32)

    def hand_back(self) -> None:
        """Round the masters into the parameters, and forget their gradients."""
        for piece, master in zip(self._held, self.pieces, strict=True):
            piece.tensor.detach().copy_(master.tensor.detach())
            master.tensor.grad = None
