"""Operators that round once more: in the last place, alike in every run, and nothing that is exact."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from spindle_cli.training.precision import NoRandomness
from spindle_cli.verify.rounding import RoundingNoise, noise_of_gradients
from spindle_cli.verify.stepping.operator_noise import OperatorNoise


def product(draw: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.linspace(1.1, 1.9, 1000).to(dtype)
    with OperatorNoise(draw).in_passes():
        return values * values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_result_is_moved_by_its_last_place_at_most(dtype: torch.dtype) -> None:
    values = torch.linspace(1.1, 1.9, 1000).to(dtype)
    off = (product(1, dtype).double() / (values * values).double() - 1).abs()
    assert 0 < off.max() <= torch.finfo(dtype).eps
    assert 0.1 < (off > 0).double().mean() < 0.6  # a rounding the other way, not one in every place


def test_a_draw_is_the_same_in_every_run_and_another_is_not() -> None:
    before = torch.get_rng_state()
    assert torch.equal(product(1), product(1)) and not torch.equal(product(1), product(2))
    assert torch.equal(before, torch.get_rng_state())


def test_it_draws_where_the_training_may_draw_nothing() -> None:
    outside = product(1)
    with NoRandomness():
        assert torch.equal(product(1), outside)


def test_whole_numbers_and_what_is_handed_on_stay_as_they_are() -> None:
    values = torch.linspace(1.1, 1.9, 10)
    with OperatorNoise(1).in_passes():
        mask = (values > 1.5).float() * torch.ones(10) + torch.zeros(10)
        handed_on = torch.cat([values.clone(), values[2:].relu()])
        seen = values.view(2, 5).t()
    assert torch.equal(mask, (values > 1.5).float())
    assert torch.equal(handed_on, torch.cat([values, values[2:]]))
    assert torch.equal(seen, values.view(2, 5).t())


def test_backward_passes_round_once_more_too() -> None:
    """Of a bias ahead of a norm nothing but rounding is left: noise in the forward pass would not show it."""
    torch.manual_seed(0)
    layer, norm, x = nn.Linear(4, 8), nn.LayerNorm(8), torch.randn(16, 4)

    def gradient(noise: OperatorNoise | None) -> Tensor:
        layer.zero_grad()
        loss = norm(layer(x)).pow(3).sum()
        if noise is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            with noise.in_passes():
                loss.backward()  # type: ignore[no-untyped-call]
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    off = (gradient(OperatorNoise(1)) - gradient(None)).abs().max() / gradient(None).abs().max()
    assert 1e-8 < off < 1e-5


def norm_gradients(shares: int, draw: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Of a LayerNorm's weight and bias, over 4000 rows in so many shares."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(16)
    rows, above = torch.randn(2, 4000, 16).bfloat16().to(dtype)
    with nullcontext() if draw is None else OperatorNoise(draw).in_passes():
        for share, gradient in zip(rows.chunk(shares), above.chunk(shares), strict=True):
            norm(share).backward(gradient)
    assert norm.weight.grad is not None and norm.bias.grad is not None
    return torch.stack([norm.weight.grad, norm.bias.grad])


def test_sums_in_low_precision_are_moved_by_what_they_lose() -> None:
    """torch's CPU adds a LayerNorm's gradients row by row in bfloat16: shares of the rows differ by percents,
    which the last place of the result does not tell.
    """
    plain, shared = norm_gradients(1), norm_gradients(4)
    lost = (plain - norm_gradients(1, dtype=torch.float32)).abs()
    draws = torch.stack([norm_gradients(1, draw) - plain for draw in (1, 2, 3)]).abs()
    assert (shared - plain).abs().max() > 2e-2 * plain.abs().max()
    assert (shared - plain).abs().amax(1).le(draws.amax((0, 2))).all()
    assert (shared - plain).norm(dim=1).le(draws.norm(dim=2).amax(0)).all()
    assert (draws <= 2 * lost + 1e-2 * plain.abs()).all()  # no more than that error in the other direction


def test_sums_in_float32_are_moved_by_their_last_place() -> None:
    plain = norm_gradients(1, dtype=torch.float32)
    moved = norm_gradients(1, draw=1, dtype=torch.float32)
    assert 0 < (moved - plain).abs().max() < 1e-6 * plain.abs().max()


def test_what_is_only_put_somewhere_is_not_moved_and_what_is_added_there_is() -> None:
    torch.manual_seed(0)
    rows, places = torch.randn(2000, 4).bfloat16(), (torch.zeros(2000, dtype=torch.long),)
    empty = torch.zeros(3, 4, dtype=torch.bfloat16)
    with OperatorNoise(1).in_passes():
        put = torch.index_put(empty, (torch.tensor([2]),), rows[:1])
        added = torch.index_put(empty, places, rows, accumulate=True)
    assert torch.equal(put[2], rows[0])
    assert not torch.equal(added, torch.index_put(empty, places, rows, accumulate=True))


def test_in_float32_what_is_below_the_floor_gets_noise_of_its_size_another_in_every_draw() -> None:
    def noisy(noise: RoundingNoise) -> Tensor:
        real, zero = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(100))
        real.grad, zero.grad = torch.tensor([1.0]), torch.full((100,), 1e-9)
        noise.add_to([real, zero])
        return zero.grad.clone()

    one, other = (noise_of_gradients(OperatorNoise(draw), None, "full") for draw in (1, 2))
    assert one is not None and other is not None
    assert 0.5e-6 < noisy(one).abs().max() <= 1.01e-6
    assert not torch.equal(noisy(one), noisy(other))
    assert noise_of_gradients(OperatorNoise(1), "float32", "bf16") is not None
    assert noise_of_gradients(OperatorNoise(1), None, "bf16-autocast") is None
    asked = RoundingNoise()
    assert noise_of_gradients(asked, None, "bf16") is asked
