"""Without chance every draw is its mean, dropout drops nothing, and results do not depend on shares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spindle_cli.workload.training.no_randomness import NoRandomness

SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "functional": lambda x: functional.dropout(x, 0.3),
    "of one half, which is torch's default": lambda x: functional.dropout(x, 0.5),
    "a module": nn.Dropout(0.3),
    "of channels": nn.Dropout1d(0.4),
    "torch's own": lambda x: torch.dropout(x, 0.2, True),
    "noise": lambda x: x + torch.randn_like(x),
    "a mask": lambda x: x.masked_fill(torch.rand(x.shape) < 0.15, 0.0),
    "an order": lambda x: x[torch.randperm(len(x))],
}


@pytest.mark.parametrize("name", SAME)
def test_what_only_chance_changes_stays(name: str) -> None:
    x = torch.randn(4, 6, 8, dtype=torch.float64, requires_grad=True)
    with NoRandomness():
        y = SAME[name](x)
    torch.testing.assert_close(y, x, rtol=0, atol=1e-15)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))


def test_attention_and_recurrent_layers_are_as_in_evaluation() -> None:
    x = torch.randn(3, 5, 8)
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    recurrent = nn.LSTM(8, 8, 2, dropout=0.5)
    with NoRandomness():
        attended = attention(x, x, x, need_weights=False)[0]
        direct = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        after = recurrent(x)[0]
    torch.testing.assert_close(attended, attention.eval()(x, x, x, need_weights=False)[0])
    torch.testing.assert_close(direct, functional.scaled_dot_product_attention(x, x, x))
    torch.testing.assert_close(after, recurrent.eval()(x)[0])


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda: torch.rand(2), [0.5, 0.5]),
        (lambda: torch.empty(2).uniform_(2, 4), [3, 3]),
        (lambda: torch.randn(2), [0, 0]),
        (lambda: torch.empty(2).normal_(1, 2), [1, 1]),
        (lambda: torch.normal(torch.tensor([3.0, 4.0]), 1.0), [3, 4]),
        (lambda: torch.randint(3, 9, (2,)), [3, 3]),
        (lambda: torch.randint(9, (2,)), [0, 0]),
        (lambda: torch.randperm(3), [0, 1, 2]),
        (lambda: torch.bernoulli(torch.tensor([0.1, 0.9])), [0.1, 0.9]),
        (lambda: torch.empty(2).bernoulli_(0.25), [0.25, 0.25]),
    ],
)
def test_draws_are_means(draw: Callable[[], Tensor], expected: list[float]) -> None:
    with NoRandomness():
        assert draw().tolist() == pytest.approx(expected)


def test_what_is_computed_again_is_the_same() -> None:
    x = torch.randn(64, requires_grad=True)
    with NoRandomness():
        y = checkpoint(lambda t: functional.dropout(t, 0.5).square(), x, use_reentrant=False)
        y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_afterwards_chance_is_back() -> None:
    with NoRandomness():
        pass
    assert functional.dropout(torch.ones(1000), 0.5).min() == 0
