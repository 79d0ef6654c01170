"""Shares of one op in one process, one after another, although each takes sums over all of them.

A share runs up to the first sum that is not known yet. When all have come there, what they have brought is
added up, and all run once more, now past it; as often as they take sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from spindle_cli.operators.tensor_group import TensorGroup

_Result = TypeVar("_Result")


class _NotSummedYetError(Exception):
    """A share has come to a sum, or a maximum, that is not known yet; what it brings to it."""

    def __init__(self, part: Tensor, *, is_max: bool) -> None:
        super().__init__("a sum over the shares was not reached by all of them")
        self.part = part
        self.is_max = is_max


class InTurn(TensorGroup):
    """Stands for the devices that run one share each."""

    def __init__(self, shares: int) -> None:
        super().__init__(tuple(range(shares)), 0, torch.device("cpu"))
        self._totals: list[Tensor] = []
        self._next = 0

    def sum_(self, tensor: Tensor, *, is_gradient: bool) -> None:  # noqa: ARG002 - one pass at a time
        """Sum in place over the shares, once all have come to it."""
        self._take(tensor, is_max=False)

    def max_(self, tensor: Tensor) -> None:
        """The largest of the shares' in place, once all have come to it."""
        self._take(tensor, is_max=True)

    def _take(self, tensor: Tensor, *, is_max: bool) -> None:
        if self._next == len(self._totals):
            raise _NotSummedYetError(tensor.clone(), is_max=is_max)
        tensor.copy_(self._totals[self._next])
        self._next += 1

    def gather(self, rows: Tensor, per_share: Sequence[int]) -> Tensor:
        """Return the rows of all shares, joined."""
        whole = rows.new_zeros((sum(per_share), *rows.shape[1:]))
        first = sum(per_share[: self.member])
        whole[first : first + len(rows)] = rows
        self.sum_(whole, is_gradient=False)
        return whole

    def scatter_sum(self, whole: Tensor, per_share: Sequence[int]) -> Tensor:
        """Sum over the shares and give this share's own rows."""
        total = whole.clone()
        self.sum_(total, is_gradient=True)
        return torch.split(total, list(per_share))[self.member]

    def exchange(
        self,
        part: Tensor,
        cut: tuple[int, Sequence[int]],
        joined: tuple[int, Sequence[int]],
        *,
        is_gradient: bool,
    ) -> Tensor:
        """Return this member's part of the shares' parts joined."""
        (cut_dim, cut_sizes), (dim, sizes) = cut, joined
        shape = list(part.shape)
        shape[dim] = sum(sizes)
        whole = part.new_zeros(shape)
        whole.narrow(dim, sum(sizes[: self.member]), sizes[self.member]).copy_(part)
        self.sum_(whole, is_gradient=is_gradient)
        return torch.split(whole, list(cut_sizes), cut_dim)[self.member]

    def run(self, shares: Sequence[Callable[[], _Result]]) -> list[_Result]:
        """Return what all shares give, of one pass.

        Raises:
            RuntimeError: some take a sum that others do not, or of another size.
        """
        self._totals = []
        while True:
            results: list[_Result] = []
            parts: list[Tensor] = []
            is_max = False
            for self.member, share in enumerate(shares):
                self._next = 0
                try:
                    results.append(share())
                except _NotSummedYetError as reached:
                    parts.append(reached.part)
                    is_max = reached.is_max
            if not parts:
                return results
            if results:
                raise RuntimeError("some shares take a sum over all of them that others do not take")
            together = torch.stack(parts)
            self._totals.append(together.amax(0) if is_max else together.sum(0))
