"""How large tensors and their differences are, which elements have a gradient of rounding's size, and one
kind of comparison, collected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spindle_cli.verify.comparing.captured import CapturedRun
from spindle_cli.verify.types import SMALL_ELEMENT, Check, Difference, What


@dataclass
class Tally:
    """Counts comparisons of one kind, and keeps the largest difference and every one beyond the tolerance."""

    what: What
    tolerance: float
    compared: int = 0
    largest: Difference | None = None
    failures: list[Difference] = field(default_factory=list)
    explained: list[Difference] = field(default_factory=list)

    def add(self, difference: Difference, tolerance: float | None = None, *, explained: bool = False) -> None:
        """Count a comparison; one that could not be made, or is beyond the tolerance, is a failure.

        `tolerance`: of this one; None: that of all. `explained`: rounding may make a difference as large.
        """
        self.compared += 1
        if _size(difference) > (self.tolerance if tolerance is None else tolerance):
            (self.explained if explained else self.failures).append(difference)
        if self.largest is None or _size(difference) > _size(self.largest):
            self.largest = difference

    def check(self) -> Check:
        """Return the result, with the largest failures first."""
        return Check(
            what=self.what,
            compared=self.compared,
            tolerance=self.tolerance,
            largest=self.largest,
            failures=tuple(sorted(self.failures, key=_size, reverse=True)),
            explained=tuple(sorted(self.explained, key=_size, reverse=True)),
        )


def _size(difference: Difference) -> float:
    return math.inf if difference.relative is None else difference.relative


def largest(tensor: Tensor) -> float:
    """Return the largest magnitude; 0 of nothing."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def ratio(gap: float, size: float) -> float:
    """Return a difference over a size; infinite where there is a difference from nothing."""
    if gap == 0:
        return 0.0
    return gap / size if size > 0 else math.inf


def by_norm(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm."""
    return ratio(float((ours - theirs).norm()), float(theirs.norm()))


def largest_gradient(plain: CapturedRun) -> float:
    """Return the largest element of all gradients of the plain run's first step."""
    return max((largest(plain.gradients.first(name)) for name in plain.gradients.holders), default=0.0)


def larger_gradient(plan: CapturedRun, plain: CapturedRun, name: str) -> Tensor:
    """Element by element, the larger of both runs' first gradients in magnitude: zero only where both are."""
    theirs = plain.gradients.first(name).double().abs()
    if name not in plan.gradients.holders:
        return theirs
    ours = plan.gradients.first(name).double().abs()
    return torch.maximum(ours, theirs) if ours.shape == theirs.shape else theirs


def noise_elements(gradient: Tensor, floor: float) -> Tensor:
    """Return where a gradient (as `larger_gradient` has it) is not zero and below the floor."""
    return (gradient > 0) & (gradient < floor)


def small_elements(gradient: Tensor, floor: float) -> Iterator[Tensor]:
    """Elements whose step rounding may decide, the surest alone first: below the noise floor, then all that
    are below a share of the tensor's largest (`SMALL_ELEMENT`).
    """
    small = noise_elements(gradient, SMALL_ELEMENT * largest(gradient))
    yield small & noise_elements(gradient, floor)
    yield small
