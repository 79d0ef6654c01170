"""What no CPU can show of single operations, in small.

python -m gpu_bench.kernels cuda|cpu
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from gpu_bench.probe import report, require
from spindle_cli.runtime.memory.given_up import give_up_memory, take_back_memory
from spindle_cli.training.precision import NoRandomness


def batch_norm_of_a_lazy_clone(device: str) -> str:
    """A batch norm's buffers that are cloned lazily keep their values while the norm changes them."""
    norm = nn.BatchNorm1d(64).to(device)
    assert norm.running_mean is not None
    kept = torch._lazy_clone(norm.running_mean)
    norm(torch.randn(32, 64, device=device) + 3.0)
    require(not kept.any(), "the clone has changed with the buffer")
    require(norm.running_mean.mean() > 0.2, "the buffer has not changed")
    return "the clone stays, the buffer moves"


def storages_emptied_and_filled(device: str) -> str:
    """A weight whose storage is emptied between forward and backward pass, and filled again, on a stream."""
    weight = nn.Parameter(torch.randn(256, 256, device=device))
    values, x = weight.detach().clone(), torch.randn(8, 256, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad((x @ values).square().sum(), x)
    loss = (x @ weight).square().sum()
    for _ in range(3):
        with torch.no_grad():
            give_up_memory(weight.data)
            other = torch.full((256, 256), float("nan"), device=device)
            take_back_memory(weight.data)
            weight.data.copy_(values)
            del other
    (found,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(found, expected)
    return "the gradient is that of the filled values"


def fused_adamw_with_an_overflow(device: str) -> str:
    """It leaves everything as it is where `found_inf` is set, and steps where it is not."""
    weight = nn.Parameter(torch.ones(1000, device=device))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    found_inf = torch.zeros((), device=device)
    optimizer.found_inf, optimizer.grad_scale = found_inf, None  # type: ignore[attr-defined]  # set by GradScaler
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before, step = weight.detach().clone(), optimizer.state[weight]["step"].item()
    found_inf.fill_(1.0)
    weight.grad.fill_(float("inf"))
    optimizer.step()
    require(torch.equal(weight, before), "parameters have changed with an overflow")
    require(optimizer.state[weight]["step"].item() == step, "the count of steps has changed")
    return f"a step, then none; {step:.0f} counted"


def native_dropout_without_chance(device: str) -> str:
    """Dropout, and attention's, drop nothing under --no-randomness."""
    x = torch.randn(2, 4, 32, 64, device=device, requires_grad=True)
    with NoRandomness():
        dropped = functional.dropout(x, 0.5)
        direct, _ = torch.native_dropout(x, 0.5, True)
        attended = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    torch.testing.assert_close(dropped, x)
    torch.testing.assert_close(direct, x)
    torch.testing.assert_close(attended, functional.scaled_dot_product_attention(x, x, x))
    (gradient,) = torch.autograd.grad(dropped.sum(), x)
    torch.testing.assert_close(gradient, torch.ones_like(x))
    return "dropout, native_dropout and attention keep everything"


CHECKS = {
    "batch norm and lazy clone": batch_norm_of_a_lazy_clone,
    "storages emptied and filled": storages_emptied_and_filled,
    "fused AdamW, overflow": fused_adamw_with_an_overflow,
    "native dropout, no randomness": native_dropout_without_chance,
}

if __name__ == "__main__":
    sys.exit(report({name: partial(check, sys.argv[1]) for name, check in CHECKS.items()}))
