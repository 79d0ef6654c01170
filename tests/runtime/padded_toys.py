"""Classification of which some batches have no label, beside a task that always has some."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spindle_cli.workload.types import Task, Workload

WIDTH, CLASSES, BATCH = 3, 4, 2
LABELS = [-100, -100, -100, 1, -100, -100, -100, -100]


class Padded(nn.Module):
    """A linear map, and the mean over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(self.linear(x), label)


def build() -> Workload:
    torch.manual_seed(0)
    items = [{"x": torch.full((WIDTH,), 0.1 * i), "label": torch.tensor(i % CLASSES)} for i in range(8)]
    padded = [{**item, "label": torch.tensor(label)} for item, label in zip(items, LABELS, strict=True)]
    tasks = [Task("full", Padded(), BATCH, items), Task("padded", Padded(), BATCH, padded)]
    return Workload("padded", tasks, (nn.Linear,))
