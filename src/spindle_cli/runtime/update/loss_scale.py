"""The loss scale: float16 gradients that would vanish do not where losses are multiplied by a large number.

It is that of `torch.amp.GradScaler`, with one difference: gradients are checked over all ranks together, so
that every rank has the same scale and leaves out the same updates. It lives on the device: the host reads it
where it reads the losses, and for checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from spindle_cli.checkpoint.index import SavedLossScale
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.settings.updates import LossScaleSettings

if TYPE_CHECKING:
    from torch import Tensor


class LossScale:
    """What losses are multiplied by before their backward passes.

    `now`: a float32 scalar on the device, which `update` changes in place.
    """

    def __init__(self, settings: LossScaleSettings, device: torch.device) -> None:
        self._settings = settings
        self.now = torch.full((), settings.init_scale, dtype=torch.float32, device=device)
        # Steps in a row in which nothing has overflowed.
        self._growing = torch.zeros((), dtype=torch.int32, device=device)

    @classmethod
    def of(cls, train: TrainSettings, device: torch.device) -> LossScale | None:
        """Makes the scale of a run's losses; None where the train settings scale nothing."""
        return None if train.scaling is None else cls(train.scaling, device)

    def unscale(self, gradients: Iterable[Sequence[Tensor]]) -> Tensor:
        """Divide gradients by the scale, in place.

        Args:
            gradients: those of one dtype together.

        Returns:
            1 where any of them is not finite, else 0: a float32 scalar.
        """
        overflowed = torch.zeros_like(self.now)
        inverse = self.now.double().reciprocal().float()
        for alike in gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(list(alike), overflowed, inverse)
        return overflowed

    def update(self, overflowed: Tensor) -> None:
        """A step is over. `overflowed`: a scalar, above 0 where a gradient of any rank was not finite."""
        settings = self._settings
        if not settings.fixed:
            torch._amp_update_scale_(
                self.now,
                self._growing,
                overflowed.to(torch.float32),
                settings.growth_factor,
                settings.backoff_factor,
                settings.growth_interval,
            )

    def saved(self) -> SavedLossScale:
        """The scale as a checkpoint has it; the host waits for it."""
        return SavedLossScale(scale=self.now.item(), growing_steps=int(self._growing.item()))

    def resume(self, saved: SavedLossScale) -> None:
        """Go on with the scale that a checkpoint has."""
        self.now.fill_(saved.scale)
        self._growing.fill_(saved.growing_steps)
