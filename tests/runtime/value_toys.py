"""Tasks whose numbers change from step to step: between operators, in them, in an object, in a module."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli import Callback, RunInfo
from spindle_cli.runtime.results import Step
from spindle_cli.workload.types import Task, Workload

WIDTH = 6
SETTINGS = {"margin": 0.5}
BUILT: list[Net] = []
HANDED: dict[str, Any] = {}  # what a build has handed out of a parameter's memory
Numbers = dict[str, Any]


class Layer(nn.Module):
    """An operator with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.linear(x))


class Counting(Layer):
    """What it changes itself is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Net(nn.Module):
    """`x`, `y`: (samples, width)."""

    temperature = 2.0

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Counting() if counts else Layer() for _ in range(3)])
        self.drop = nn.Dropout(0.0)
        self.beta = 0.0
        self.config = SimpleNamespace(power=1.0, unread=1.0)
        self.register_buffer("shift", torch.zeros(()))
        self.seen = 0  # read by nobody

    def forward(self, x: Tensor, y: Tensor, *, slope: float = 0.0) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        apart = (self.drop(x) - y).square().mean(1) / self.temperature + self.shift
        size = x.square().mean(1) * self.config.power
        loss = (1 - self.beta) * apart + self.beta * size + SETTINGS["margin"] * x.abs().mean(1)
        loss = loss + slope * x.mean(1)
        return {"loss": loss.mean(), "apart": apart}


class Points(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": y}


def ramp(step: int) -> float:
    return min(1.0, step / 4)


def gains(step: int) -> float:
    return 0.5 + 0.25 * step


DECLARED: Numbers = {
    "beta": ramp,
    "layers.*.gain": gains,
    "config.power": [[0, 1.0], [2, 3.0]],
    "slope": lambda step: 0.1 * step,
    "value_toys:SETTINGS.margin": lambda step: 1.0 / (step + 1),
}


def numbers_of(step: int) -> Numbers:
    """What `DECLARED` says, worked out by hand."""
    return {
        "beta": min(1.0, step / 4),
        "gain": 0.5 + 0.25 * step,
        "power": min(3.0, 1.0 + step),
        "margin": 1.0 / (step + 1),
        "slope": 0.1 * step,
    }


def set_by_hand(net: Net, numbers: Numbers) -> None:
    """As a plain loop would."""
    net.beta, net.config.power = numbers["beta"], numbers["power"]
    SETTINGS["margin"] = numbers["margin"]
    for layer in net.layers:
        layer.gain = numbers["gain"]


def build(
    declared: bool = True,
    controlled: bool = False,
    evaluated: bool = False,
    counts: bool = False,
    hands_out: bool = False,
) -> Workload:
    SETTINGS.setdefault("margin", 0.5)
    net = Net(counts)
    for layer in net.layers:
        layer.gain = 0.5
    BUILT.append(net)
    if hands_out:
        memory = net.layers[0].linear.weight.detach()
        memory.numpy()[0] *= 0.5  # while it is built
        HANDED.update(array=memory.numpy(), tensor=memory)
    values: Numbers = DECLARED if declared else {}
    if controlled:
        values = {**values, "beta": 0.25}
    task = Task(
        "net",
        net,
        batch_size=4,
        dataset=Points(),
        step_values=values,
        eval_dataset=Points() if evaluated else None,
    )
    return Workload("values", [task], operators=(Layer,))


@dataclass
class Controls(Callback):
    """Sets a number by what a step came to."""

    run: RunInfo | None = None

    def at_start(self, run: RunInfo) -> None:
        self.run = run

    def after_step(self, step: Step) -> None:
        assert self.run is not None
        self.run.set_value("net/beta", step.number / 8)
