"""Masters: float32 copies of what a rank steps, where parameters are held in fewer bits.

An update is often smaller than the last bit of a bfloat16 number. So the optimizer steps the masters, and
the parameters are the masters rounded. Only an owned range's owner has its master.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.training.precision import dtype_in

# A checkpoint's key for them, beside those of the optimizer's state.
MASTER_KEY = "master"


class Masters:
    """The masters of some owned ranges. `owned_ranges`: the same owned ranges with the masters as tensors."""

    def __init__(self, owned_ranges: Sequence[OwnedRange]) -> None:
        self._held = tuple(owned_ranges)
        self.owned_ranges = tuple(
            replace(owned, tensor=nn.Parameter(_master(owned.tensor.detach()))) for owned in owned_ranges
        )

    def take_parameters(self) -> None:
        """Start again from the parameters as they are."""
        _copy_all(self._values(self.owned_ranges), self._values(self._held))

    def take_gradients(self, names: Collection[str] | None = None) -> None:
        """Give each master the gradient that its owned range has, or none; `names`: of those to do it with,
        all if None.
        """
        copies: list[Tensor] = []
        gradients: list[Tensor] = []
        for owned, master in self._pairs(names):
            gradient = owned.tensor.grad
            if gradient is None or gradient.dtype == master.tensor.dtype:
                master.tensor.grad = gradient
            else:
                master.tensor.grad = torch.empty_like(gradient, dtype=master.tensor.dtype)
                copies.append(master.tensor.grad)
                gradients.append(gradient)
        _copy_all(copies, gradients)

    def hand_back(self, names: Collection[str] | None = None) -> None:
        """Round the masters into the parameters, and forget their gradients; `names`: as above."""
        pairs = self._pairs(names)
        _copy_all(self._values([held for held, _ in pairs]), self._values([master for _, master in pairs]))
        for _, master in pairs:
            master.tensor.grad = None

    def _pairs(self, names: Collection[str] | None) -> list[tuple[OwnedRange, OwnedRange]]:
        """Return owned ranges of these names, or all, with their masters."""
        both = zip(self._held, self.owned_ranges, strict=True)
        return [pair for pair in both if names is None or pair[0].name in names]

    @staticmethod
    def _values(owned_ranges: Sequence[OwnedRange]) -> list[Tensor]:
        return [owned.tensor.detach() for owned in owned_ranges]


def _master(values: Tensor) -> Tensor:
    """A copy in float32; of complex numbers, of which a conversion would lose a half, in those as wide."""
    return values.to(dtype_in(values.dtype, torch.float32), copy=True)


def _copy_all(to: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into tensors of other dtypes, by as few kernels as may be."""
    if to:  # torch takes no empty lists
        torch._foreach_copy_(to, values)
