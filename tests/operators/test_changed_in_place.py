"""What our own autograd functions give may be changed in place, as what torch's own give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers.thread_groups import in_threads
from spindle_cli.operators.factors import Capturing
from spindle_cli.operators.tensor_group import SequencePart, sum_forward

WORDS, WIDTH, OUT = 7, 4, 3


class Made:
    """Makes a matrix's gradient of what it takes."""

    def __init__(self, like: Tensor) -> None:
        self.gradient = torch.zeros_like(like)

    def take_rows(self, ids: Tensor, rows: Tensor) -> None:
        self.gradient.index_add_(0, ids, rows)

    def take_factors(self, outputs: Tensor, inputs: Tensor) -> None:
        self.gradient += outputs.T @ inputs


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "activation": lambda x: functional.relu(x, inplace=True),
    "activation of torch.nn": nn.ReLU(inplace=True),
    "residual": lambda x: x.add_(torch.ones_like(x)),
    "part": lambda x: _part_zeroed(x),
    "twice": lambda x: functional.silu(x.mul_(2), inplace=True),
}


def _part_zeroed(x: Tensor) -> Tensor:
    x[..., 0] = 0
    return x


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("shape", [(5, WIDTH), (2, 5, WIDTH)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("trained_input", [True, False])
def test_a_product_whose_factors_are_taken(
    name: str, shape: tuple[int, ...], has_bias: bool, trained_input: bool
) -> None:
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=trained_input)
    weight = torch.randn(OUT, WIDTH, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(OUT, dtype=torch.float64, requires_grad=True) if has_bias else None
    leaves = [leaf for leaf in (x if trained_input else None, bias) if leaf is not None]

    def run() -> Tensor:
        loss: Tensor = CHANGES[name](functional.linear(x, weight, bias)).pow(2).sum()
        return loss

    plain = run()
    expected = torch.autograd.grad(plain, [weight, *leaves])
    taker = Made(weight)
    with Capturing({id(weight): taker}):
        loss = run()
        loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(loss, plain) and weight.grad is None
    for found, of_plain in zip([taker.gradient, *(leaf.grad for leaf in leaves)], expected, strict=True):
        torch.testing.assert_close(found, of_plain)


@pytest.mark.parametrize("name", CHANGES)
def test_a_lookup_whose_rows_are_taken(name: str) -> None:
    torch.manual_seed(1)
    ids = torch.tensor([1, 5, 1, 0])
    table = torch.randn(WORDS, WIDTH, dtype=torch.float64, requires_grad=True)
    plain = CHANGES[name](functional.embedding(ids, table)).pow(2).sum()
    (expected,) = torch.autograd.grad(plain, table)
    taker = Made(table)
    with Capturing({id(table): taker}):
        loss = CHANGES[name](functional.embedding(ids, table)).pow(2).sum()
        loss.backward()
    assert torch.equal(loss, plain) and table.grad is None
    torch.testing.assert_close(taker.gradient, expected)


def _summed(x: Tensor, group: Any) -> Tensor:
    return sum_forward(x * (group.member + 1), group)


def _gathered(x: Tensor, group: Any) -> Tensor:
    part = SequencePart(2, 1, group)
    return part.gather(part.cut(x))


def _joined(x: Tensor, group: Any) -> Tensor:
    return SequencePart(2, 1, group).cut(x).whole()


def _scattered(x: Tensor, group: Any) -> Tensor:
    return SequencePart(2, 1, group).scatter_sum(x.clone()).tensor


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("made", [_summed, _gathered, _joined, _scattered])
@pytest.mark.parametrize("samples", [1, 2])
def test_what_a_group_exchanges(made: Callable[[Tensor, Any], Tensor], name: str, samples: int) -> None:
    """The same as where a copy of it is changed."""
    x = torch.randn(samples, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(group: Any, ready: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        loss = CHANGES[name](ready(made(leaf, group))).pow(2).sum()
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    found, _ = in_threads(2, lambda group: run(group, lambda tensor: tensor))
    expected, _ = in_threads(2, lambda group: run(group, torch.clone))
    for own, of_copy in zip(found, expected, strict=True):
        torch.testing.assert_close(own, of_copy)
