"""Activations copied to host memory and back on streams of their own: the same numbers, less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from spindle_cli.runtime.step.host_copies import HostMemory
from spindle_cli.runtime.step.offload import SliceCopies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

WIDTH, ROWS, LAYERS = 1024, 4096, 8


class Layer(nn.Module):
    """Keeps several times its input; what autograd saves is large and made by kernels in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.1)


def train(moved: set[int], steps: int = 4) -> tuple[list[Tensor], int]:
    """Gradients of some steps, and the most memory that was taken."""
    torch.manual_seed(1)
    device = torch.device("cuda", 0)
    layers = nn.ModuleList(Layer() for _ in range(LAYERS)).to(device)
    host, found = HostMemory(device), []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
        copies, y = SliceCopies(host, [x]), x
        for number, layer in enumerate(layers):
            copies.make_room()
            if number in moved:
                with copies.moving(number, [layer]):
                    y = layer(y)
            else:
                y = layer(y)
                if number + 1 in moved:
                    copies.watch([y])
        copies.end_forward()
        copies.begin_backward()
        y.square().mean().backward()
        copies.end_backward()
        found += [x.grad.clone() if x.grad is not None else x]
    found += [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]
    torch.cuda.synchronize()
    return found, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("moved", [{0, 1, 2, 3, 4, 5, 6}, {0, 2, 4, 6}, {7}])
def test_copies_beside_compute_change_no_number(moved: set[int]) -> None:
    plain, _ = train(set())
    for _ in range(3):  # a race shows now and then
        found, _ = train(moved)
        assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))


def test_memory_is_that_of_ops_under_way() -> None:
    """Of eight layers seven are moved: at least three layers' activations less than all."""
    _, whole = train(set())
    _, less = train(set(range(LAYERS - 1)))
    kept = ROWS * (3 * WIDTH + 2 * 2 * WIDTH) * 4  # of a layer, at least
    assert less < whole - 3 * kept
