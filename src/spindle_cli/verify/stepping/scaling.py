"""The loss scale in plain PyTorch: torch's own `GradScaler`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spindle_cli.workload.settings.loss_scale import LossScaleSettings


class Scaling:
    """Scales losses, and leaves out the updates of all optimizers where a gradient of any has overflowed.

    `GradScaler` by itself leaves out those of the optimizer alone whose gradients have: then some parameters
    would be a step ahead of others.
    """

    def __init__(self, settings: LossScaleSettings, device: torch.device) -> None:
        self._fixed = settings.init_scale if settings.fixed else None
        self._scaler = torch.amp.GradScaler(
            device.type,
            init_scale=settings.init_scale,
            growth_factor=settings.growth_factor,
            backoff_factor=settings.backoff_factor,
            growth_interval=settings.growth_interval,
        )
        self._unscaled: list[torch.optim.Optimizer] = []

    @property
    def now(self) -> float:
        """The scale of the step that is trained."""
        return self._scaler.get_scale()

    def scale(self, loss: Tensor) -> Tensor:
        """A loss times the scale."""
        return self._scaler.scale(loss)

    def unscale(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Take the scale out of the gradients of all optimizers; whether any has overflowed."""
        self._unscaled = [each for each in optimizers if _has_gradients(each)]
        found: list[Tensor] = []
        for optimizer in self._unscaled:
            self._scaler.unscale_(optimizer)
            found.extend(self._scaler._found_inf_per_device(optimizer).values())
        overflowed = any(bool(flag.item()) for flag in found)
        for flag in found:
            flag.fill_(float(overflowed))
        return overflowed

    def step(self) -> None:
        """Update by all optimizers or none, and then the scale."""
        for optimizer in self._unscaled:
            self._scaler.step(optimizer)
        if self._unscaled:
            self._scaler.update(self._fixed)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(each.grad is not None for group in optimizer.param_groups for each in group["params"])
