"""Tasks whose data come in the ways that replica groups have them: by index, and as streams."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from spindle_cli.workload.types import Task, Workload

WIDTH = 8


def sample(number: int) -> dict[str, Tensor]:
    """What depends on the number alone."""
    drawn = torch.Generator().manual_seed(number)
    return {"x": torch.randn(WIDTH, generator=drawn), "y": torch.tensor([float(number % 3)])}


class ByIndex(Dataset[dict[str, Tensor]]):
    """Samples with noise drawn as they are read. `decode_s`: what each takes."""

    def __init__(self, count: int = 22, decode_s: float = 0.0, fails_at: int | None = None) -> None:
        self.count = count
        self.decode_s = decode_s
        self.fails_at = fails_at

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.fails_at:
            raise ValueError(f"sample {index} is broken")
        time.sleep(self.decode_s)
        found = sample(index)
        return {**found, "x": found["x"] + 0.1 * torch.randn(WIDTH)}


class Stream(IterableDataset[dict[str, Tensor]]):
    """Samples one after the other, each worker its own part; with noise. `log`: a line for each that is
    read. `once`: gives nothing the second time.
    """

    def __init__(
        self, count: int = 22, log: str | None = None, *, sharded: bool = True, once: bool = False
    ) -> None:
        self.count = count
        self.log = log
        self.sharded = sharded
        self.once = once
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.samples_from(0)

    def samples_from(self, first: int) -> Iterator[dict[str, Tensor]]:
        info = get_worker_info() if self.sharded else None
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if self.once and self.epoch:
            return
        for number in range(worker, self.count, workers):
            if number < first:
                continue
            if self.log is not None:
                with Path(self.log).open("a", encoding="utf-8") as file:
                    file.write(f"{os.getpid()} {self.epoch} {number}\n")
            found = sample(100 * self.epoch + number)
            self.next = number + 1
            yield {**found, "x": found["x"] + 0.1 * torch.randn(WIDTH)}


class Stateful(Stream):
    """A stream that knows where it is."""

    next = 0
    begins_at = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        begins_at, self.begins_at = self.begins_at, 0
        return self.samples_from(begins_at)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins_at = self.next = state["next"]


class Killed(ByIndex):
    """One whose reader is killed at a sample, as by a system that has no memory left."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.fails_at and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample(index)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return functional.mse_loss(self.head(x), y)


def build(log: str | None = None, decode_s: float = 0.0, kind: str = "all", **dataset: Any) -> Workload:
    """A task for each kind of dataset, or one of them with arguments of its dataset."""
    layers = nn.ModuleList([Layer() for _ in range(2)])
    kinds = {"by_index": ByIndex, "stream": Stream, "stateful": Stateful, "killed": Killed}
    if kind != "all":
        if kind == "by_index":
            dataset["decode_s"] = decode_s
        tasks = [Task(kind, Net(layers), 4, kinds[kind](**dataset))]
    else:
        tasks = [
            Task("by_index", Net(layers), 4, ByIndex(decode_s=decode_s)),
            Task("stream", Net(layers), 4, Stream(log=log)),
            Task("stateful", Net(layers), 4, Stateful()),
        ]
    return Workload(name="data", tasks=tasks, operators=(Layer,))
