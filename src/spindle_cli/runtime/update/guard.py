"""Keep an update that would spoil the model from happening, without the host's knowing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class UpdateGuard:
    """Keeps an update that would spoil the model away from parameters and optimizer state, on the device.

    The fused kernels of torch.optim (Adam, AdamW and SGD) leave everything as it is where a number on the
    device says so; it is the one that loss scaling uses. Other optimizers do their update, which nobody sees:
    the losses are read before anything is saved or captured, and the run ends there. Where a gradient has
    overflowed the run goes on, so that they are not asked for an update (`Optimizers.step`).
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
        """`optimizers`: this rank's; none where it trains nothing."""
        self._skips = torch.zeros((), dtype=torch.float32, device=device)
        for optimizer in optimizers:
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.found_inf = self._skips  # type: ignore[attr-defined]  # torch reads it so, untyped

    def judge(self, *values: Tensor | None, overflowed: Tensor | None = None) -> Tensor:
        """Let the next update happen only where all of these are finite, and nothing has overflowed; gives a
        scalar that is 1 where it is left out, else 0.
        """
        finite = [torch.isfinite(value).all() for value in values if value is not None]
        self._skips.copy_(torch.stack(finite).all().logical_not())
        if overflowed is not None:
            torch.maximum(self._skips, overflowed.to(torch.float32), out=self._skips)
        return self._skips
