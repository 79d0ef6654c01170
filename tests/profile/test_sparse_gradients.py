"""Sparse gradients are refused by the name of their parameter, wherever they come from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.workload.types import Task, Workload

ROWS, WIDTH = 12, 4


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randint(ROWS, (3,), generator=torch.Generator().manual_seed(index))}


class Looking(nn.Module):
    """An operator that calls torch's function itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.embedding(x, self.table, sparse=True).sum(1)


class Net(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.head = table, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x)).pow(2).mean()  # type: ignore[no-any-return]


def profiled(table: nn.Module) -> None:
    workload = Workload("w", [Task("t", Net(table), 4, Rows())], (type(table),))
    check_numbers(analysed(workload), 0, CheckSettings())


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (nn.Embedding(ROWS, WIDTH, sparse=True), "table.weight"),
        (nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True), "table.weight"),
        (Looking(), "table.table"),
    ],
)
def test_sparse_gradients_are_refused_by_name(table: nn.Module, name: str) -> None:
    with pytest.raises(WorkloadError, match=f"task 't': the gradient of '{name}' is sparse"):
        profiled(table)


def test_a_frozen_table_has_no_gradient() -> None:
    profiled(nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True).requires_grad_(False))
