"""What only CUDA's kernels do with chance and with rounding: fused rates, generators of devices, TF32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.training.precision import NoRandomness, compute_convolutions_in_float32
from spindle_cli.verify.plain import generator_states, require_no_chance
from spindle_cli.workload.types import Task, Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

# Dropout on CUDA is one kernel with its backward, and so is attention in half precision.
FUSED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "dropout": functional.dropout,
    "attention": lambda x, rate: functional.scaled_dot_product_attention(x, x, x, dropout_p=rate),
    "recurrent": lambda x, rate: _recurrent(rate)(x[0].float())[0],
}


def _recurrent(rate: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.LSTM(64, 64, 2, dropout=rate).cuda()


@pytest.mark.parametrize("name", FUSED)
def test_rates_are_gone_forward_and_backward(name: str) -> None:
    x = torch.randn(2, 4, 16, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    kept = FUSED[name](x, 0.0)
    (expected,) = torch.autograd.grad(kept.float().square().sum(), x)
    with NoRandomness() as chance:
        found = FUSED[name](x, 0.5)
    (gradient,) = torch.autograd.grad(found.float().square().sum(), x)
    torch.testing.assert_close(found, kept, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-2)
    assert chance.replaced


def test_drawing_on_the_device_is_noticed() -> None:
    workload = Workload("w", [Task("t", nn.Linear(1, 1), 2, [{"x": torch.zeros(1)}] * 4)])
    device = torch.device("cuda", 0)
    before = generator_states(device)
    require_no_chance(workload, before, device)
    torch.rand(4, device=device)
    with pytest.raises(WorkloadError, match="draws random numbers"):
        require_no_chance(workload, before, device)


def test_convolutions_take_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    x, weight = (
        torch.randn(8, 64, 32, 32, device="cuda"),
        torch.randn(64, 64, 3, 3, device="cuda"),
    )
    exact = functional.conv2d(x.double(), weight.double())
    compute_convolutions_in_float32()
    error = (functional.conv2d(x, weight) - exact).norm() / exact.norm()
    assert error < 1e-5  # TF32: 3e-4
