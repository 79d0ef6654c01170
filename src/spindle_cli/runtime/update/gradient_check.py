"""What all ranks find out together of a step's gradients, in one sum, before parameters are updated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spindle_cli.runtime.update.clip import GradientClip, gradients_by_dtype
from spindle_cli.runtime.update.loss_scale import LossScale
from spindle_cli.runtime.update.owned_ranges import OwnedRange


@dataclass(frozen=True)
class GradientCheck:
    """What all ranks found of a step's gradients, on the device; it is the same on every rank.

    Attributes:
        norm: of all of them before they are clipped, [1] in float64; None: they are not clipped.
        scaling: [2] in float64: what the step's losses were multiplied by, and 1 where a gradient has
            overflowed, else 0; None: losses are not scaled.
    """

    norm: Tensor | None = None
    scaling: Tensor | None = None

    @property
    def overflowed(self) -> Tensor | None:
        """A scalar: 1 where a gradient has overflowed, so that the step leaves everything as it is."""
        return None if self.scaling is None else self.scaling[1]


class GradientChecker:
    """Checks a step's gradients together with those of all ranks, unscales and clips them."""

    def __init__(
        self,
        owned_ranges: Collection[OwnedRange],
        clip_norm: float | None,
        scale: LossScale | None,
        device: torch.device,
    ) -> None:
        """`owned_ranges`: all that this rank steps. `device`: of the collective."""
        self._stepped = tuple(owned.tensor for owned in owned_ranges)
        self._clip = None if clip_norm is None else GradientClip(clip_norm, owned_ranges)
        self._scale = scale
        self._device = device

    def check(self) -> GradientCheck:
        """Take the scale out of this rank's gradients and clip them by the norm of all, in place. Collective:
        every rank calls it, also one that trains nothing.
        """
        terms: list[Tensor] = []
        if self._scale is not None:
            overflowed = self._scale.unscale(gradients_by_dtype(self._stepped))
            terms.append(overflowed.to(torch.float64).reshape(1))
        if self._clip is not None:
            terms.append(self._clip.squares(self._device))
        sums = torch.cat(terms)
        dist.all_reduce(sums)
        scaling = None
        if self._scale is not None:
            scaling = torch.stack([self._scale.now.to(torch.float64), (sums[0] > 0).to(torch.float64)])
        return GradientCheck(None if self._clip is None else self._clip.clip(sums[-1:]), scaling)
