"""How large tensors and their differences are, and which elements have a gradient of rounding's size."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from spindle_cli.verify.comparing.captured import CapturedRun
from spindle_cli.verify.types import SMALL_ELEMENT


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
