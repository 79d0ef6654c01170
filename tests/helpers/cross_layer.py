"""A layer that takes what the first one was given, too: what comes before them all belongs to each."""

from __future__ import annotations

from torch import Tensor, nn


class Cross(nn.Module):
    """A cross layer, as DCN has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        return first * self.linear(x) + x
