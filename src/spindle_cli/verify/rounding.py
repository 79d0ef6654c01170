"""What rounding alone does to a training: plain PyTorch again, its gradients off in the last places.

Two ways of adding up the same gradients differ by rounding, and training amplifies it: Adam divides a
gradient by its own size, a ReLU near zero switches. So where final parameters differ by more than the
tolerance while losses and first gradients agree, plain training is repeated with its gradients changed by
noise of rounding's size. What that changes is the yardstick for what the plan may change.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from spindle_cli.files.request import DtypeName
from spindle_cli.verify.stepping.named import as_real
from spindle_cli.verify.stepping.operator_noise import OperatorNoise
from spindle_cli.verify.types import NOISE_FLOOR
from spindle_cli.workload.file import Precision

# Noise in a gradient over the tensor's largest element, in units of the dtype's machine epsilon. A plan's
# gradients were seen to differ from plain ones by 1 to 8 of them (digits, the README's model).
NOISE_EPSILONS = 4.0
# How many times what rounding changed a plan's run may differ: the two are draws of the same kind, not equal.
FACTOR = 4.0
# Beyond this no yardstick excuses a difference: a stale parameter or a lost step of Adam's is larger.
LARGEST_TOLERANCE = 1e-3

# Asks the plain process for it.
ROUNDING_FLAG = "--rounding"


class RoundingNoise:
    """Adds noise of rounding's size to gradients; the same in every run of one number of a draw."""

    def __init__(self, floor: float = 0.0, draw: int = 0) -> None:
        """`floor`: what is not zero but below this share of the largest gradient of all is rounding itself,
        and gets noise of that size; by default nothing is.
        """
        self._floor = floor
        # A generator of its own: the training draws the same random numbers with and without.
        self._generator = torch.Generator().manual_seed(draw)

    def add_to(self, parameters: Iterable[nn.Parameter]) -> None:
        """Change every gradient's elements by up to `NOISE_EPSILONS` epsilons of its largest; those below the
        floor by up to the floor.
        """
        given = [
            parameter.grad
            for parameter in parameters
            if parameter.grad is not None and parameter.grad.numel() > 0
        ]
        gradients = [as_real(gradient) for gradient in given]
        floor = self._floor * max((float(gradient.abs().max()) for gradient in gradients), default=0.0)
        for gradient in gradients:
            size = NOISE_EPSILONS * torch.finfo(gradient.dtype).eps * gradient.abs().max()
            sizes = torch.where((gradient != 0) & (gradient.abs() < floor), floor, size)
            draws = torch.rand(gradient.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
            gradient.add_(draws.to(gradient.device, gradient.dtype) * sizes)


def widened(tolerance: float, yardstick: float) -> float:
    """Return the tolerance, or what rounding alone explains if that is more, up to `LARGEST_TOLERANCE`."""
    return max(tolerance, min(FACTOR * yardstick, LARGEST_TOLERANCE))


def noise_of_gradients(
    noise: RoundingNoise | OperatorNoise | None, dtype: DtypeName | None, precision: Precision
) -> RoundingNoise | None:
    """Return what is added to gradients before every step.

    Operators also round inside of themselves, where they sum, and that is not moved. Of a gradient below the
    floor it may be all there is, as of a bias ahead of a norm: in float32 such gradients get noise of the
    floor's size, of this draw. With low precision what operators give rounds more than their sums.
    """
    if not isinstance(noise, OperatorNoise):
        return noise
    is_single = dtype == "float32" or (dtype is None and precision == "full")
    return RoundingNoise(NOISE_FLOOR["float32"], noise.draw) if is_single else None
