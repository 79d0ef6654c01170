"""Labels that an operator's own mean ignores end a run that splits it, and no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spindle_cli.errors import WorkloadError
from spindle_cli.runtime.step.counting import Portion
from spindle_cli.runtime.step.data import Feed
from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.training.batches import Batches
from spindle_cli.workload.types import Task, Workload

CPU = torch.device("cpu")


class Head(nn.Module):
    def __init__(self, ignore_index: int) -> None:
        super().__init__()
        self.linear, self.ignored = nn.Linear(3, 4), ignore_index

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(self.linear(x), label, ignore_index=self.ignored)


class Model(nn.Module):
    def __init__(self, ignore_index: int) -> None:
        super().__init__()
        self.head = Head(ignore_index)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.head(x, label)


def task(ignore_index: int = -100) -> Task:
    labels = [1, -100, 2, 3]
    items = [{"x": torch.ones(3), "label": torch.tensor(label)} for label in labels]
    return Task("t", Model(ignore_index), 4, items)


def test_an_operator_with_another_ignore_index_is_whole_and_by_default_its_labels_are_looked_at() -> None:
    (op,) = analyse(Workload("w", [task()], operators=(Head,))).tasks["t"].ops
    assert not op.coupled
    assert op.shares is not None
    assert op.shares.all_must_count == ("label",)
    (op,) = analyse(Workload("w", [task(0)], operators=(Head,))).tasks["t"].ops
    assert op.coupled


def test_an_ignored_label_is_refused_where_all_must_count() -> None:
    portions = (Portion("t", (0, 4), ("x", "label")),)
    batches = {"t": Batches(task(), 0)}
    Feed(batches, portions, range(1), CPU).take()
    with pytest.raises(WorkloadError, match="'label' has labels of -100"):
        Feed(batches, portions, range(1), CPU, all_must_count={"t": ("label",)}).take()
