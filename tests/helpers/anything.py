"""A module for tests of data alone."""

from __future__ import annotations

from typing import Any

from torch import nn


class Anything(nn.Module):
    """Takes batches with any fields."""

    def forward(self, **batch: Any) -> None:
        raise NotImplementedError
