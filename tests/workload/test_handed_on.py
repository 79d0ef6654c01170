"""What operators hand on that has no batch dimension: shares have copies, or the operator stays whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.workload.types import Task, Workload

WIDTH, BATCH = 4, 6


class Biased(nn.Module):
    """Hands on rows, and a bias that no sample has a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        bias = bias + self.shift
        return self.linear(x) + bias, bias


class Centred(Biased):
    """Its bias is the mean over the batch."""

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x)
        return x, bias + x.mean(0)


class Queries(nn.Module):
    """Hands on nothing but a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return bias + self.query


class Halves(nn.Module):
    """Hands on two biases, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, bias: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return bias[0] + self.query, bias[1] * self.query


class Both(nn.Module):
    """Hands on rows, a bias that no sample has a part in, and one that is the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.linear(x)
        return x, self.shift * 2, x.mean(0)


class Net(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.end = Biased()

    def forward(self, x: Tensor) -> Tensor:
        bias = self.start
        for layer in self.layers:
            given = layer(x, bias)
            x, bias = given if isinstance(layer, Biased) else (x, given)
        return self.end(x, bias)[0].square().mean()


class WithHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(WIDTH))
        self.halves, self.end = Halves(), Biased()

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.halves(x, (self.start, self.start + 1))
        return self.end(x, first + second)[0].square().mean()


class WithBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.end = Both(), Biased()

    def forward(self, x: Tensor) -> Tensor:
        x, shift, mean = self.both(x)
        return self.end(x + mean, shift)[0].square().mean()


class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))}


def coupled(layer: type[nn.Module], model: nn.Module | None = None) -> list[bool]:
    """By op, whether it stays whole."""
    model = model or Net(layer)
    workload = Workload("net", [Task("task", model, BATCH, Data())], operators=(layer, Biased))
    return [op.coupled for op in analysed(workload).tasks["task"].ops]


def test_a_bias_that_is_the_same_for_every_batch_leaves_operators_split() -> None:
    assert coupled(Biased) == [False, False, False]


def test_a_mean_over_the_batch_keeps_the_operators_that_hand_it_on_whole() -> None:
    assert coupled(Centred)[:2] == [True, True]


def test_an_operator_that_gives_nothing_for_a_sample_stays_whole() -> None:
    assert coupled(Queries) == [True, True, False]


def test_an_operator_that_gives_several_values_and_none_for_a_sample_stays_whole() -> None:
    assert coupled(Halves, WithHalves())[0] is True


def test_a_mean_over_the_batch_keeps_whole_what_also_hands_on_a_bias_that_is_the_same_for_all() -> None:
    assert coupled(Both, WithBoth())[0] is True
