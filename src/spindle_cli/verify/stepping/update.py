"""What updates the parameters in plain PyTorch: optimizers, learning rates and the average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from spindle_cli.training.optimizing.groups import optimizer_groups
from spindle_cli.training.optimizing.optimizer import imported
from spindle_cli.workload.building.load import LoadedWorkload
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import root_of
from spindle_cli.workload.types import FlowTask, Task

# Arguments of schedules that may be lists over optimizer groups.
LISTED = {"lr_lambda", "max_lr", "base_lr", "max_momentum", "base_momentum"}


def make_optimizers(
    loaded: LoadedWorkload, parameters: Mapping[str, nn.Parameter]
) -> dict[int, torch.optim.Optimizer]:
    """Return the train settings' optimizers, by the number of their optimizer group, over what is trained of
    it.
    """
    roots = {task.name: root_of(task) for task in loaded.workload.tasks}
    groups = optimizer_groups(loaded.train, roots)
    made = {}
    for index, choice in enumerate(groups.choices):
        of_group = [parameters[name] for name, group in groups.of.items() if group == index]
        if of_group:
            made[index] = named(choice.optimizer)(of_group, lr=choice.lr, **choice.arguments)
    return made


def make_schedule(
    train: TrainSettings, optimizer: torch.optim.Optimizer, group: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Return the train settings' learning-rate schedule for the optimizer of this group, if they have one."""
    if train.warmup_steps is not None or train.decay is not None:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, warmed_up(train, optimizer.defaults["lr"]))
    return None if train.schedule is None else schedule_of(train.schedule.model_dump(), optimizer, group)


def warmed_up(train: TrainSettings, lr: float) -> Callable[[int], float]:
    """The factor of `lr` by the number of updates that are done, as docs/training-settings.md has it."""
    rising = train.warmup_steps or 0
    falling = (train.decay_steps or train.steps) - rising
    low = train.min_lr / lr if train.min_lr is not None else train.final_fraction or 0.0

    def factor(done: int) -> float:
        if done < rising:
            return (1 + done) / (1 + rising)
        left = max(0.0, (rising + falling - done) / falling) if falling > 0 else 0.0
        if train.decay == "linear":
            return low + left * (1 - low)
        if train.decay == "cosine":
            return low + (1 - low) * 0.5 * (1 - math.cos(math.pi * left))
        return 1.0

    return factor


def schedule_of(
    recipe: Mapping[str, Any], optimizer: torch.optim.Optimizer, group: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule of torch's by its name and arguments, which may hold others and functions, and of the
    numbers and functions of groups in lists this group's.
    """
    arguments = {key: value for key, value in recipe.items() if key != "name"}
    for key in LISTED & arguments.keys():
        arguments[key] = arguments[key][group] if isinstance(arguments[key], list) else arguments[key]
    if "lr_lambda" in arguments:
        arguments["lr_lambda"] = named(arguments["lr_lambda"])
    if "schedulers" in arguments:
        arguments["schedulers"] = [schedule_of(inner, optimizer, group) for inner in arguments["schedulers"]]
    make: Callable[..., torch.optim.lr_scheduler.LRScheduler] = getattr(
        torch.optim.lr_scheduler, recipe["name"]
    )
    return make(optimizer=optimizer, **arguments)


def named(path: str) -> Any:
    """Return what 'package.module:name' or 'file.py:name' names; without a module, of torch.optim."""
    return imported(path, "train") if ":" in path else getattr(torch.optim, path)


def weights_at(train: TrainSettings, tasks: Sequence[Task | FlowTask], step: int) -> dict[str, float]:
    """Return the weight of each task's loss in the total of a step, counted from 0."""
    weight_by_task = {task.name: float(task.weight) for task in tasks}
    setting = train.task_weights
    if isinstance(setting, str):
        weight_by_task.update(named(setting)(step))
    else:
        for name, points in (setting or {}).items():
            steps, weights = zip(*points, strict=True)
            weight_by_task[name] = float(numpy.interp(step, steps, weights))
    return weight_by_task


@dataclass(frozen=True)
class Averaging:
    """torch's own moving average of what the optimizer steps, by name."""

    model: nn.ParameterList
    averaged: AveragedModel
    names: tuple[str, ...]
    every: int

    @classmethod
    def of(cls, train: TrainSettings, stepped: Mapping[str, nn.Parameter]) -> Averaging | None:
        """None where the train settings ask for none."""
        if train.ema is None:
            return None
        model = nn.ParameterList(stepped.values())
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(train.ema.decay))  # type: ignore[no-untyped-call]  # torch: untyped
        return cls(model, averaged, tuple(stepped), train.ema.every)

    def update(self, steps_done: int) -> None:
        """A step has been made."""
        if steps_done % self.every == 0:
            self.averaged.update_parameters(self.model)

    def values(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the averages in the numbers of the parameters; these themselves before the first."""
        if self.averaged.n_averaged == 0:
            return dict(parameters)
        held = dict(zip(self.names, self.averaged.module.parameters(), strict=True))
        return {name: held[name].detach().to(parameter.dtype) for name, parameter in parameters.items()}
