"""A workload whose tasks are evaluated, with all that eval mode changes and all that must not change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from spindle_cli.workload.types import Task, Workload

WIDTH, CLASSES, BATCH = 6, 3, 4
HELD_OUT = 11  # two batches of 4, and one of 3


class Items(Dataset[dict[str, Tensor]]):
    """Samples with labels of which some are ignored."""

    def __init__(self, count: int, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, WIDTH, generator=drawn)
        self.label = torch.randint(0, CLASSES, (count,), generator=drawn)
        self.label[1::4] = -100

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "label": self.label[index]}


class Layer(nn.Module):
    """Dropout and a norm: of the batch, or of each sample."""

    def __init__(self, of_batch: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if of_batch else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.linear(x)))) * (2 if self.training else 3)


class Counting(Layer):
    """The same, with a buffer that every forward pass changes; it couples the samples."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x) * (1 + 0.1 * self.calls)


class Head(nn.Module):
    """Logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Classify(nn.Module):
    """Glue that is another in eval mode; results of an operator, of glue, and of the batch itself."""

    def __init__(self, layers: nn.ModuleList, head: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = layers, head

    def forward(self, x: Tensor, label: Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x)
        x = functional.dropout(x, 0.5, self.training)
        if not self.training:
            x = x * 2
        logits = self.head(x)
        loss = functional.cross_entropy(logits, label)
        return {"loss": loss, "logits": logits, "best": logits.argmax(1), "label": label, "scale": x.sum()}


class Contrast(nn.Module):
    """Couples samples; as large as the batch is."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        logits = a @ b.T
        return functional.cross_entropy(logits, torch.arange(len(a), device=a.device))


class Pairs(nn.Module):
    """A coupled loss."""

    def __init__(self, layers: nn.ModuleList, head: nn.Module) -> None:
        super().__init__()
        self.layers, self.other, self.loss = layers, head, Contrast()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a = x
        for layer in self.layers:
            a = layer(a)
        return {"loss": self.loss(self.other(a), self.other(x)), "features": a}


class Inputs(Items):
    """Samples alone."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index]}


class Streamed(IterableDataset[dict[str, Tensor]]):
    """The samples of a dataset, one after the other; in each pass from the beginning."""

    def __init__(self, items: Items) -> None:
        self.items = items

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.items[index] for index in range(len(self.items)))


def accuracy(out: dict[str, Tensor]) -> Tensor:
    counts = out["label"] != -100
    assert bool((out["best"] == out["logits"].argmax(1)).all())
    return (out["best"] == out["label"])[counts].double().mean()


def in_order(out: dict[str, Tensor]) -> float:
    """Another number for every order of the samples."""
    rows = out["logits"].double().sum(1)
    return float((rows * torch.arange(1, len(rows) + 1)).sum())


def features(out: dict[str, Tensor]) -> float:
    rows = out["features"].double().sum(1)
    return float((rows * torch.arange(1, len(rows) + 1)).sum())


def build(
    *, evaluates: bool = True, held_out: int = HELD_OUT, streams: bool = False, batch_norms: bool = True
) -> Workload:
    """`batch_norms`: in the first task; with them its batches cannot be cut."""
    layers = nn.ModuleList(Layer(batch_norms) for _ in range(3))
    other = nn.ModuleList((Counting(), Layer(), Layer()))
    dataset: Any = Items(held_out, 7) if evaluates else None
    inputs: Any = Inputs(held_out, 8) if evaluates else None
    if streams:
        dataset, inputs = Streamed(dataset), Streamed(inputs)
    metrics = {"accuracy": accuracy, "in_order": in_order}
    return Workload(
        name="evaluated",
        tasks=[
            Task(
                "classify",
                Classify(layers, Head()),
                BATCH,
                Items(16, 1),
                weight=0.5,
                eval_dataset=dataset,
                metrics=metrics,
            ),
            Task(
                "pairs",
                Pairs(other, Head()),
                BATCH,
                Inputs(16, 2),
                eval_dataset=inputs,
                metrics={"features": features},
            ),
        ],
        operators=(Layer, Counting, Head),
        coupled=(Contrast,),
    )


def build_failing() -> Workload:
    workload = build()
    workload.tasks[0].metrics = {"broken": lambda out: out["nothing"]}
    return workload


def build_tensor() -> Workload:
    workload = build()
    workload.tasks[0].metrics = {"rows": lambda out: out["logits"]}
    return workload
