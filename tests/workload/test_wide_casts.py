"""In float64 nothing is rounded to float32 by what code writes; other types stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from spindle_cli.training.precision import constants_in

X = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)

CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float()": lambda x: x.float(),
    "to(float32)": lambda x: x.to(torch.float32),
    "to(dtype=)": lambda x: x.to(dtype=torch.float32),
    "to(device, dtype)": lambda x: x.to("cpu", torch.float32),
    "type(dtype)": lambda x: x.type(torch.float32),
    "type(name)": lambda x: x.type("torch.FloatTensor"),
    "softmax(dtype=)": lambda x: functional.softmax(x, -1, dtype=torch.float32),
    "sum(dtype=)": lambda x: x.sum(dtype=torch.float32),
    "zeros(dtype=)": lambda x: torch.zeros(2, dtype=torch.float32) + x.float(),
    "arange(dtype=)": lambda x: torch.arange(2, dtype=torch.float32) / 3,
    "tensor(dtype=)": lambda x: torch.tensor([1 / 3], dtype=torch.float32),
    "new_tensor(dtype=)": lambda x: x.new_full((2,), 1 / 3, dtype=torch.float32),
}


def test_weights_of_distances_are_not_lost() -> None:
    weight = torch.tensor([1.0, 0.0], dtype=torch.float64)
    expected = functional.l1_loss(X, 1 - X, weight=weight)
    with constants_in(torch.float64):
        assert functional.l1_loss(X, 1 - X, weight=weight) == expected


@pytest.mark.parametrize("name", CASTS)
def test_what_is_cast_to_float32_stays_float64(name: str) -> None:
    assert CASTS[name](X).dtype is torch.float32
    with constants_in(torch.float64):
        assert CASTS[name](X).dtype is torch.float64
    assert CASTS[name](X).dtype is torch.float32


def test_other_types_are_as_they_are_written() -> None:
    with constants_in(torch.float64):
        assert X.to(torch.bfloat16).dtype is torch.bfloat16
        assert X.half().dtype is torch.float16
        assert torch.zeros(1, dtype=torch.int64).dtype is torch.int64
        assert X.to(torch.int32).float().dtype is torch.float64


def test_in_float32_nothing_is_another() -> None:
    with constants_in(torch.float32):
        assert X.float().dtype is torch.float32
        assert X.to(torch.float32).dtype is torch.float32


def test_gradients_pass_through_the_casts_unrounded() -> None:
    x = X.clone().requires_grad_()
    with constants_in(torch.float64):
        (x.float() / 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1 / 3, 1 / 3]


class Doubled(torch.autograd.Function):
    """A user's function, both of whose passes cast."""

    seen: list[torch.dtype] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Doubled.seen.append(gradient.float().dtype)
        return 2 * gradient.float()


def through_backward(loss: Tensor, x: Tensor) -> None:
    loss.backward()


def through_autograd(loss: Tensor, x: Tensor) -> None:
    torch.autograd.backward((loss,), (None,))


def through_grad(loss: Tensor, x: Tensor) -> None:
    (x.grad,) = torch.autograd.grad(loss, x)


@pytest.mark.parametrize("backward", [through_backward, through_autograd, through_grad])
def test_nothing_is_rounded_in_backward_passes(backward: Callable[[Tensor, Tensor], None]) -> None:
    """Neither in what runs forward again, of which torch compares the types, nor in passes of a user's."""
    x = X.clone().requires_grad_()
    with constants_in(torch.float64):
        again = checkpoint(lambda x: (x.float() / 3).exp(), x, use_reentrant=False)
        backward(Doubled.apply(again).sum(), x)
        assert Doubled.seen.pop() is torch.float64
        assert X.float().dtype is torch.float64  # the mode is still on
    assert X.float().dtype is torch.float32
    torch.testing.assert_close(x.grad, (X / 3).exp() * 2 / 3, rtol=1e-15, atol=0)


def test_a_second_backward_pass_inside_of_one_is_wide() -> None:
    """As where a layer that runs forward again asks for a gradient itself."""

    def energy(x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        (force,) = torch.autograd.grad((inner.float() / 3).square().sum(), inner)
        return force.float() * x

    x = X.clone().requires_grad_()
    with constants_in(torch.float64):
        checkpoint(energy, x, use_reentrant=False).sum().backward()
        assert X.float().dtype is torch.float64
    torch.testing.assert_close(x.grad, X * 2 / 9, rtol=1e-15, atol=0)
