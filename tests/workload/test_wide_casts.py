"""In float64 nothing is rounded to float32 by what code writes; other types stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from spindle_cli.workload.training.precision import constants_in

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
