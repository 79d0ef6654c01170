"""Clipping by the global norm: that of the gradients of all parameters together, wherever they are; or by
value, each element by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from spindle_cli.runtime.update.owned_ranges import OwnedRange

# As in torch.nn.utils.clip_grad_norm_, so that clipped gradients are those of plain PyTorch.
_EPSILON = 1e-6


class GradientClip:
    """Scales gradients down to a global norm, as `torch.nn.utils.clip_grad_norm_` does on one device.

    Ranks that step a parameter whole hold the same gradient of it after the gradient sums; one of them counts
    it. Of a parameter that is stepped in ranges, each rank counts its own.
    """

    def __init__(self, max_norm: float, owned_ranges: Collection[OwnedRange]) -> None:
        """`owned_ranges`: all ranges that this rank steps."""
        self._max_norm = max_norm
        self._trained = tuple(owned.tensor for owned in owned_ranges)
        self._counted = tuple(owned.tensor for owned in owned_ranges if owned.counted)

    def squares(self, device: torch.device) -> Tensor:
        """The sum of the squares of what this rank counts, [1] in float64 on a device; the ranks' sums add up
        to the square of the norm.
        """
        squares = torch.zeros(1, dtype=torch.float64, device=device)
        for mine in gradients_by_dtype(self._counted):
            squares += torch.stack(torch._foreach_norm(mine)).to(torch.float64).square().sum()
        return squares

    def clip(self, squares: Tensor) -> Tensor:
        """Scale this rank's gradients, in place.

        Args:
            squares: of all ranks together, [1].

        Returns:
            The norm before it, [1].
        """
        norm = squares.sqrt()
        self._scale((self._max_norm / (norm + _EPSILON)).clamp(max=1.0))
        return norm

    def _scale(self, factor: Tensor) -> None:
        for gradients in gradients_by_dtype(self._trained):
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype).reshape(()))


class ValueClip:
    """Brings each element of the gradients to a size at most, as `torch.nn.utils.clip_grad_value_` does:
    wherever an element is, and whoever has the others, it becomes the same.
    """

    def __init__(self, size: float, owned_ranges: Collection[OwnedRange]) -> None:
        """`owned_ranges`: all ranges that this rank steps."""
        self._size = size
        self._owned_ranges = tuple(owned_ranges)

    def clip(self, names: frozenset[str] | None = None) -> None:
        """Clip this rank's gradients, in place; `names`: of these parameters, all if None."""
        chosen = (owned.tensor for owned in self._owned_ranges if names is None or owned.name in names)
        for gradients in gradients_by_dtype(chosen):
            torch._foreach_clamp_min_(gradients, -self._size)
            torch._foreach_clamp_max_(gradients, self._size)


def gradients_by_dtype(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Their gradients, those of one dtype together: a kernel for many tensors takes one dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    return list(by_dtype.values())
