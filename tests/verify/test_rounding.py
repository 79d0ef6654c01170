"""The yardstick of rounding: of rounding's size, the same each time, and no excuse for real differences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spindle_cli.verify.rounding import (
    FACTOR,
    LARGEST_TOLERANCE,
    NOISE_EPSILONS,
    RoundingNoise,
    widened,
)


def noisy_gradient() -> torch.Tensor:
    parameter = nn.Parameter(torch.zeros(1000))
    parameter.grad = torch.linspace(-2, 2, 1000)
    RoundingNoise().add_to([parameter, nn.Parameter(torch.zeros(3))])  # the second has no gradient
    return parameter.grad


def test_noise_is_a_few_epsilons_of_the_largest_element() -> None:
    change = (noisy_gradient().double() - torch.linspace(-2, 2, 1000).double()).abs().max()
    allowed = NOISE_EPSILONS * torch.finfo(torch.float32).eps * 2
    assert allowed / 2 < change <= allowed * 1.5  # the sum is rounded, too


def test_what_is_below_the_floor_gets_noise_as_large_as_the_floor() -> None:
    real, zero = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1000))
    real.grad = torch.tensor([2.0, -8.0])  # the largest of all: the floor is 8e-3
    zero.grad = torch.full((1000,), 1e-5)
    zero.grad[0], zero.grad[1] = 0.0, 8.1e-3
    RoundingNoise(1e-3).add_to([real, zero])
    moved = (zero.grad - 1e-5).abs()
    assert 7e-3 < moved[2:].max() <= 8e-3
    assert zero.grad[0] == pytest.approx(0, abs=1e-8) and zero.grad[1] == pytest.approx(8.1e-3, abs=1e-8)
    assert torch.allclose(real.grad, torch.tensor([2.0, -8.0]), atol=1e-5)


def test_noise_is_the_same_in_every_run_and_draws_nothing_from_the_training() -> None:
    before = torch.get_rng_state()
    assert torch.equal(noisy_gradient(), noisy_gradient())
    assert torch.equal(before, torch.get_rng_state())


def test_the_tolerance_grows_with_the_yardstick_up_to_a_limit() -> None:
    assert widened(1e-5, 0.0) == 1e-5
    assert widened(1e-5, 5e-5) == pytest.approx(FACTOR * 5e-5)
    assert widened(1e-5, 1.0) == LARGEST_TOLERANCE
