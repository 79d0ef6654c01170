"""The end of a rank's step: its gradients are checked with those of all ranks, then its parameters follow.

An update that would spoil the model does not happen, without the host's knowing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from spindle_cli.runtime.update.clip import ValueClip
from spindle_cli.runtime.update.gradient_check import GradientCheck, GradientChecker
from spindle_cli.runtime.update.loss_scale import LossScale
from spindle_cli.runtime.update.masters import Masters
from spindle_cli.runtime.update.optimizers import Optimizers
from spindle_cli.runtime.update.owned_ranges import OwnedRange


class Update:
    """One rank's. `scale`: of the losses; None: they have none. `is_begun`: some parameters are those of the
    next step already, and others are not.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        owned_ranges: Collection[OwnedRange],
        masters: Masters | None,
        scale: LossScale | None,
        clip_norm: float | None,
        clip_value: float | None,
        device: torch.device,
    ) -> None:
        """`owned_ranges`: what `optimizers` step. `clip_norm`, `clip_value`: one at most. `device`: of
        the collectives of all ranks.
        """
        self._optimizers = optimizers
        self._masters = masters
        self.is_begun = False
        self.scale = scale
        self._checks_gradients = clip_norm is not None or scale is not None
        self._checker = GradientChecker(owned_ranges, clip_norm, scale, device)
        self._value_clip = None if clip_value is None else ValueClip(clip_value, owned_ranges)
        self._guard = UpdateGuard((group.optimizer for group in optimizers.groups), device)

    def check_gradients(self) -> GradientCheck:
        """Do what `GradientChecker.check` does; a collective, behind `take_gradients`."""
        return self._checker.check()

    def take_gradients(self, names: frozenset[str] | None = None) -> None:
        """Give masters, where there are any, their gradients; `names`: of these parameters, all if None."""
        if self._masters is not None:
            self._masters.take_gradients(names)

    def step_part(self, losses: Tensor, names: frozenset[str]) -> None:
        """Step the optimizers for these parameters, of which all ranks' gradients are there, unless a loss is
        not finite. `step` comes behind it, and does what a step does once.
        """
        if not self.is_begun:
            self._guard.require_finite(losses)
        self.is_begun = True
        self.take_gradients(names)
        self._clip_values(names)
        self._optimizers.step_part(names)
        if self._masters is not None:
            self._masters.hand_back(names)

    def step(
        self, losses: Tensor, gradient_check: GradientCheck, names: frozenset[str] | None = None
    ) -> None:
        """Step the optimizers, unless a loss, or the norm of the gradients, is not finite, or a gradient has
        overflowed. `names`: of the parameters that are not stepped yet; None: of all.
        """
        skips = self._guard.require_finite(losses, gradient_check.norm, overflowed=gradient_check.overflowed)
        if not self._checks_gradients:
            self.take_gradients(names)
        self._clip_values(names)
        self._optimizers.step(None if self.scale is None else skips, names)
        if self._masters is not None:
            self._masters.hand_back(names)
        self.is_begun = False
        if self.scale is not None:
            assert gradient_check.overflowed is not None, "gradients are checked where losses are scaled"
            self.scale.update(gradient_check.overflowed)

    def _clip_values(self, names: frozenset[str] | None) -> None:
        if self._value_clip is not None:
            self._value_clip.clip(names)

    def unscaled(self, gradient: Tensor) -> Tensor:
        """Return a copy of a gradient before it is checked, without the scale."""
        copy = gradient.clone()
        if self.scale is not None:
            self.scale.unscale([[copy]])
        return copy


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

    def require_finite(self, *values: Tensor | None, overflowed: Tensor | None = None) -> Tensor:
        """Let the next update happen only where all of these are finite, and nothing has overflowed; gives a
        scalar that is 1 where it is left out, else 0.
        """
        finite = [torch.isfinite(value).all() for value in values if value is not None]
        self._skips.copy_(torch.stack(finite).all().logical_not())
        if overflowed is not None:
            torch.maximum(self._skips, overflowed.to(torch.float32), out=self._skips)
        return self._skips
