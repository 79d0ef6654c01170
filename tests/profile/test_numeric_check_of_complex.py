"""Complex parameters, buffers, fields and values are checked by numbers, and measured, as real ones are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from spindle_cli.analysis.analyse import analyse
from spindle_cli.profile.checking.compare import relative_difference
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.profile.op.op_memory import _end
from spindle_cli.training.precision import constants_in, dtype_in
from spindle_cli.workload.types import Task, Workload


class Signals(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.signals = torch.randn(8, 5, 4, dtype=torch.cfloat, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.signals)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.signals[index]}


class Wave(nn.Module):
    """Takes and gives complex numbers, by a matrix and a buffer of them."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.linspace(0, 3, 4)))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.zeros(len(x), 5, 4, dtype=torch.cfloat, device=x.device)
        mixed[:, 1:] = torch.einsum("blc,cd->bld", (x * self.turn)[:, 1:], self.mix)
        return torch.complex(functional.silu(mixed.real), mixed.imag) + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.ModuleList([Wave(), Wave()])

    def forward(self, x: Tensor) -> Tensor:
        for wave in self.waves:
            x = wave(x)
        return torch.view_as_real(x).pow(2).mean()


def test_complex_numbers_are_split_and_checked_in_float64() -> None:
    graph = analyse(Workload("w", [Task("t", Net(), 6, Signals())], (Wave,)))
    assert not any(metaop.coupled for metaop in graph.metaops)
    (task,) = check_numbers(graph, 0, CheckSettings(threads=1)).tasks
    assert (task.whole, task.unchecked, task.forward_unchecked) == ({}, {}, None)
    assert 0 < task.largest_difference < 1e-13


def test_a_difference_in_the_imaginary_part_is_one() -> None:
    ours = torch.tensor([1.0 + 1.0j, 2.0 + 0.5j])
    assert relative_difference(ours, ours.conj().resolve_conj(), 0.0) == 1.0


def test_memory_is_measured_behind_complex_outputs() -> None:
    output = torch.ones(3, dtype=torch.cfloat, requires_grad=True)
    torch.autograd.backward(_end(output * 1j))
    assert output.grad is not None


def test_numbers_stay_complex_where_real_ones_change_their_type() -> None:
    """As wide as those; whole numbers stay what they are."""
    assert dtype_in(torch.complex64, torch.float64) is torch.complex128
    assert dtype_in(torch.complex64, torch.bfloat16) is torch.complex64
    assert dtype_in(torch.int64, torch.float64) is torch.int64
    with constants_in(torch.float64):
        assert torch.zeros(1, dtype=torch.cfloat).dtype is torch.complex128
        assert torch.zeros(1).cfloat().dtype is torch.complex128
