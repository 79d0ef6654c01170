"""Code as data parallelism has it: it asks torch.distributed and the environment whether there are others."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_world_size, is_initialized

from spindle_cli.workload.types import Task, Workload

WIDTH = 4


def is_alone() -> bool:
    """Whether one process is all that can be seen."""
    told = os.environ.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}
    return not (told or is_initialized() or dist.is_initialized())


def num_processes() -> int:
    return get_world_size() if is_initialized() else 1


def mean_over_processes(count: Tensor) -> Tensor:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(count)
    return (count / num_processes()).clamp(min=1)


class Scaled(torch.autograd.Function):
    """Its gradient is as many times as large as there are processes."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * num_processes()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * (1.0 if is_alone() else 3.0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Scaled.apply(self.linear(x))) * (1.0 if is_alone() else 5.0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(Layer(), Layer()), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        losses = self.head(self.layers(x)).square().sum(1) * num_processes()
        return (losses * mask).sum() / mean_over_processes(mask.sum())


class Items(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        scale = 1.0 if is_alone() else 7.0
        return {"x": torch.linspace(i, scale, WIDTH), "mask": torch.tensor(float(i % 3 != 1))}


def build() -> Workload:
    torch.manual_seed(0)
    if not is_alone():
        raise RuntimeError("it is built where others can be seen")
    return Workload("guarded", [Task("t", Model(), 4, Items())], (Layer, nn.Linear))
