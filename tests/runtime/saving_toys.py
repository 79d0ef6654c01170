"""Functions of a user's own that save a parameter and their input, in layers with a hook on what they are
given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload

WIDTH = 32  # of what is moved nothing is tiny


class Scaled(torch.autograd.Function):
    """x * weight, with both saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: 3 * gradient)  # type: ignore[no-untyped-call]
        return x + torch.tanh(self.linear(Scaled.apply(x, self.weight)))  # type: ignore[no-untyped-call]


class OtherLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return 0.5 * y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.first = nn.Sequential(Layer(), Layer())
        self.second = nn.Sequential(OtherLayer(), OtherLayer())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.stem(x)))).square().mean()


class Items(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": torch.linspace(i / 12, 1.0, 4)}


def build() -> Workload:
    torch.manual_seed(0)
    layers = (Layer, OtherLayer, nn.Linear)
    return Workload("saving", [Task("t", Model(), 4, Items())], layers)
