"""A model, and callbacks whose code sets what it reads, in ways that people have."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli import Callback, RunInfo
from spindle_cli.runtime.results import Step
from spindle_cli.workload.types import Task, Workload

TEMPERATURE = 1.0
UNREAD = 1.0
LIMITS = {"low": 0.0, "high": 1.0}
MODELS: list[Any] = []


def scaled(x: Tensor) -> Tensor:
    return clipped(x) / TEMPERATURE


def clipped(x: Tensor) -> Tensor:
    return x.clamp(LIMITS["low"], LIMITS["high"])


@lru_cache
def power() -> float:
    return FACTORS.square


def shifted(x: Tensor, by: list[float] = [0.0]) -> Tensor:  # noqa: B006 - as people have it
    return x + by[0] + shifted.more  # type: ignore[attr-defined, no-any-return]


shifted.more = 0.0  # type: ignore[attr-defined]


class FACTORS:
    square = 2.0
    unread = 2.0


class Schedule:
    """A plain object, whose method forward calls."""

    def __init__(self) -> None:
        self.begins = 0.5
        self.told = 0

    def weight(self) -> float:
        return self.begins

    def summary(self) -> int:
        return self.told


def closed_over(offset: float) -> Any:
    def add(x: Tensor) -> Tensor:
        return x + offset

    return add


class Reversed(torch.autograd.Function):
    """Has a number that its backward alone reads."""

    strength = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -Reversed.strength * gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(self.linear(x)) * self.rate  # type: ignore[no-any-return, no-untyped-call]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.beta = 0.0
        self.named = 0.0
        self.epoch = 0
        self.schedule = Schedule()
        self.steps = [1.0, 2.0]
        self.config = SimpleNamespace(inner=SimpleNamespace(scale=1.0))
        self.add = closed_over(0.25)
        self.kept = torch.zeros(2)
        self.criterion = nn.functional.relu

    def set_beta(self, value: float) -> None:
        self.beta = value

    def describe(self) -> int:
        return self.epoch

    def weighted(self, x: Tensor) -> Tensor:
        return self.beta * x

    def forward(self, x: Tensor) -> Tensor:
        h = self.add(scaled(self.block(x))) ** power()
        h = h * self.schedule.weight() + sum(self.steps) * self.config.inner.scale + self.kept.sum()
        h = shifted(self.weighted(h) + getattr(self, "named"))  # noqa: B009 - as people have it
        return self.criterion(h).mean()


def build() -> Workload:
    model = Model()
    MODELS.append(model)
    samples = [{"x": torch.ones(4)} for _ in range(8)]
    return Workload("watched", [Task("task", model, batch_size=4, dataset=samples)], operators=(Block,))


def declared() -> Workload:
    made = build()
    made.tasks[0].step_values = {"beta": lambda step: step / 10}
    return made


def anneal(number: float) -> None:
    for model in MODELS:
        model.beta = number


class ByFunction(Callback):
    def after_step(self, step: Step) -> None:
        anneal(step.number / 10)


class ByMethod(Callback):
    def after_step(self, step: Step) -> None:
        MODELS[-1].set_beta(0.1)


class ByName(Callback):
    def after_step(self, step: Step) -> None:
        setattr(MODELS[-1], "named", 0.1)  # noqa: B010 - as people have it


class ByGlobal(Callback):
    def after_step(self, step: Step) -> None:
        global TEMPERATURE
        TEMPERATURE = 0.5


class ByKey(Callback):
    def after_step(self, step: Step) -> None:
        LIMITS["high"] *= 0.5


class ByClass(Callback):
    def at_checkpoint(self, step: int, folder: Any) -> None:
        FACTORS.square = 3.0


class Own(Callback):
    """Has attributes of its own by these names, and sets what nobody reads."""

    def __init__(self) -> None:
        self.beta = 0.9
        self.rate = 0.1
        self.info = SimpleNamespace()

    def at_start(self, run: RunInfo) -> None:
        self.beta = 0.5

    def after_step(self, step: Step) -> None:
        self.rate = self.beta * 0.1
        MODELS[-1].epoch = step.number
        self.info.weighted = self.info.block = 3.0
        MODELS[-1].schedule.told = 1

    def never_called(self) -> None:
        MODELS[-1].beta = 1.0
