"""Rows of all shares of a batch on every device, with their gradients summed and handed back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from spindle_cli.operators.autograd import applied
from spindle_cli.operators.tensor_group import TensorGroup


class ShareRows:
    """Which samples of a batch one device has, and what it gathers of the others in one run.

    Attributes:
        first, count: its own samples; `size`: those of the batch.
        per_share: how many each share has, in order.
    """

    def __init__(self, group: TensorGroup, cuts: Sequence[int], gathered: list[Tensor] | None = None) -> None:
        """`gathered`: keeps what is gathered; where it has something, that is taken in its place."""
        self.per_share = tuple(last - first for first, last in pairwise(cuts))
        self.first, self.count, self.size = cuts[group.member], self.per_share[group.member], cuts[-1]
        self._group = group
        self._gathered = gathered
        self._replayed = iter(tuple(gathered)) if gathered else None

    def gather(self, own: Tensor) -> Tensor:
        """Give the rows of all shares, along the first dimension, for this share's own."""
        if self._replayed is not None:
            return next(self._replayed)
        whole = self._group.gather(own, self.per_share)
        if self._gathered is not None:
            self._gathered.append(whole)
        return whole

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """Sum rows over the shares, along the first dimension, and give this share's own."""
        return self._group.scatter_sum(whole, self.per_share)


def gather_rows(own: Tensor, dim: int, rows: ShareRows) -> Tensor:
    """The rows of all shares, which lie along a dimension; differentiable."""
    return applied(_Gathered, own, dim, rows)


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, dim: int, rows: ShareRows) -> Tensor:
        ctx.dim, ctx.rows = dim, rows
        return rows.gather(own.detach().movedim(dim, 0).contiguous()).movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        whole = gradients[0].movedim(ctx.dim, 0).contiguous()
        return ctx.rows.scatter_sum(whole).movedim(0, ctx.dim), None, None
