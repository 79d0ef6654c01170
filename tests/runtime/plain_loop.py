"""What every run is compared with: the user's own modules, trained by a plain loop in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from helpers.analysed import analysed_before, built_by
from spindle_cli.training.data.reading import open_batches
from spindle_cli.verify.flow import run_flow
from spindle_cli.verify.plain import runs_at
from spindle_cli.verify.stepping.update import make_optimizers, make_schedule, weights_at
from spindle_cli.workload.arguments import call_forward
from spindle_cli.workload.building.load import load
from spindle_cli.workload.graph import IGNORED_LABEL, ParameterTable, root_of
from spindle_cli.workload.types import FlowTask, Task


@dataclass(frozen=True)
class PlainRun:
    """Per step: the tasks' losses. After each parameter's first step: its gradient. After the last:
    parameters and buffers. By canonical name.
    """

    losses: list[dict[str, float]]
    gradients: dict[str, Tensor]
    final: dict[str, Tensor]
    buffers: dict[str, Tensor]


class PlainTraining:
    """A workload's modules in this process, with the optimizer and schedule of its train settings."""

    def __init__(self, source: str, dtype: torch.dtype) -> None:
        loaded = load(source)
        self.train = loaded.train
        self.tasks = loaded.workload.tasks
        self.parameters = ParameterTable.of(analysed_before(built_by(source), loaded.workload)).parameters
        self._dtype = dtype
        for task in self.tasks:
            root_of(task).to(dtype)
        by_group = make_optimizers(loaded, self.parameters)
        self._optimizers = list(by_group.values())
        self.optimizer = self._optimizers[0]  # the only one without optimizer groups
        made = [make_schedule(loaded.train, optimizer, group) for group, optimizer in by_group.items()]
        self._schedules = [schedule for schedule in made if schedule is not None]
        self._batches = {
            task.name: open_batches(
                task, self.train.seed, loading=self.train.loader.of(task.name), varies=True
            )
            for task in self.tasks
        }

    def step(self, step: int) -> tuple[dict[str, float], dict[str, Tensor]]:
        """The tasks' losses, and the gradients before clipping by canonical name. `step`: counted from 0."""
        for parameter in self.parameters.values():
            parameter.grad = None
        losses: dict[str, float] = {}
        count = self.train.accumulate
        weights = weights_at(self.train, self.tasks, step)
        due = [task for task in self.tasks if runs_at(self.train, task.name, step)]
        first = {
            task.name: count * sum(runs_at(self.train, task.name, before) for before in range(step))
            for task in due
        }
        for task in due:
            taken = [
                self._batches[task.name].rows(first[task.name] + number, 0, task.batch_size)
                for number in range(count)
            ]
            for batch, share in zip(taken, shares_of(task, taken), strict=True):
                batch = {name: t.to(self._dtype) if t.is_floating_point() else t for name, t in batch.items()}
                result = run_flow(task, batch) if isinstance(task, FlowTask) else call_forward(task, batch)
                loss = share * (result["loss"] if isinstance(result, dict) else result)
                (weights[task.name] * loss).backward()
                losses[task.name] = losses.get(task.name, 0.0) + loss.item()
        gradients = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        if self.train.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.train.clip_norm)
        if self.train.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters.values(), self.train.clip_value)
        for optimizer in self._optimizers:
            optimizer.step()
        for schedule in self._schedules:
            schedule.step()
        return losses, gradients

    @property
    def values(self) -> dict[str, Tensor]:
        """Copies of the parameters by canonical name."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers by the name that the first task has for them."""
        named = [
            (f"{task.name}.{name}", buffer)
            for task in self.tasks
            for name, buffer in root_of(task).named_buffers()
        ]
        return {name: buffer.detach().clone() for name, buffer in named}


def shares_of(task: Task | FlowTask, batches: list[dict[str, Tensor]]) -> list[float]:
    """What the loss of each of a step's batches counts: of a mean over labels by how many are not ignored."""
    if task.reduction == "sum":
        return [1.0] * len(batches)
    if any("labels" not in batch for batch in batches):
        return [1 / len(batches)] * len(batches)
    counts = [int((batch["labels"] != IGNORED_LABEL).sum()) for batch in batches]
    return [count / sum(counts) for count in counts]


def train_plainly(source: str, steps: int, dtype: torch.dtype) -> PlainRun:
    """Train `steps` steps with the optimizer of the source's train settings; once for all sources that say
    the same, since many plans of one workload are compared with it.
    """
    return _trained(_Asked(Path(source).read_text(), steps, dtype, source))


@dataclass(frozen=True)
class _Asked:
    content: str
    steps: int
    dtype: torch.dtype
    source: str = field(compare=False)


@cache
def _trained(asked: _Asked) -> PlainRun:
    training = PlainTraining(asked.source, asked.dtype)
    done = [training.step(step) for step in range(asked.steps)]
    gradients = {name: gradient for _, of_step in reversed(done) for name, gradient in of_step.items()}
    return PlainRun([losses for losses, _ in done], gradients, training.values, training.buffers)
