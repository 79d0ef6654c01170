"""Keep an update that would spoil the model from happening, without the host's knowing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class UpdateGuard:
    """Keeps an update that would spoil the model away from parameters and optimizer state, on the device.

    The fused kernels of torch.optim (Adam, AdamW and SGD) leave everything as it is where a number on the
    device says so; it is the one that loss scaling uses. Other optimizers do their update, which nobody sees:
    the losses are read before anything is saved or captured, and the run ends there.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
        """`optimizers`: this rank's; none where it trains nothing."""
        self._skips = torch.zeros((), dtype=torch.float32, device=device)
        for optimizer in optimizers:
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.found_inf = self._skips  # type: ignore[attr-defined]  # torch reads it so, untyped

    def judge(self, *values: Tensor | None) -> None:
        """Let the next update happen only where all of these are finite."""
        finite = [torch.isfinite(value).all() for value in values if value is not None]
        self._skips.copy_(torch.stack(finite).all().logical_not())
