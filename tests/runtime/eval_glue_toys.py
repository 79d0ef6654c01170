"""Tasks whose layers all take what is computed once in training, and what eval mode would compute again in
each of them: behind a batch norm, with parameters or with running statistics alone, and behind dropout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from eval_toys import BATCH, CLASSES, HELD_OUT, WIDTH, Items
from torch import Tensor, nn

from helpers.cross_layer import Cross
from spindle_cli.workload.types import Task, Workload


class Score(nn.Module):
    """Cross layers over one first value, which the loss and a metric take, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Linear(WIDTH, WIDTH) if kind != "running" else nn.Identity()
        self.norm = nn.BatchNorm1d(WIDTH, affine=kind != "running") if kind != "dropout" else nn.Identity()
        self.layers = nn.ModuleList(Cross(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def first(self, x: Tensor) -> Tensor:
        """What all layers take."""
        x = self.norm(self.embed(x))
        return functional.dropout(x, 0.3, self.training) if self.kind == "dropout" else x

    def forward(self, x: Tensor, label: Tensor) -> dict[str, Any]:
        first = self.first(x)
        x = first
        for layer in self.layers:
            x = layer(first, x)
        logits = self.head(x + first)
        return {"loss": functional.cross_entropy(logits, label), "first": first, "logits": logits}


def _mean(out: dict[str, Tensor]) -> float:
    return float((out["first"] * out["logits"].mean(1, keepdim=True)).mean())


def build(kind: str = "norm") -> Workload:
    """One task."""
    module = Score(kind)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    task = Task(
        "score",
        module,
        batch_size=BATCH,
        dataset=Items(16, seed=1),
        eval_dataset=Items(HELD_OUT, seed=2),
        metrics={"mean": _mean},
    )
    return Workload(name="first-values", tasks=[task], operators=(Cross,))
