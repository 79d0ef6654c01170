"""The learning rates of a step, of all optimizer groups: also of those of which a rank steps nothing."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from spindle_cli.runtime.update.optimizers import Optimizers
from spindle_cli.training.optimizing.groups import OptimizerGroups
from spindle_cli.training.optimizing.optimizer import make_optimizer
from spindle_cli.training.optimizing.schedules import advance, make_schedule
from spindle_cli.workload.file import TrainSettings

ALL = "all"


class LearningRates:
    """What the next update takes, by optimizer group; the same on every rank."""

    def __init__(
        self, train: TrainSettings, groups: OptimizerGroups, optimizers: Optimizers, steps_done: int
    ) -> None:
        """`optimizers`: this rank's; where it has none for a group, another stands in that trains nothing."""
        optimizers_by_name = {group.choice.name: group.optimizer for group in optimizers.groups}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._stand_ins: list[tuple[torch.optim.Optimizer, LRScheduler]] = []
        for choice in groups.choices:
            optimizer = optimizers_by_name.get(choice.name)
            if optimizer is None:
                optimizer = make_optimizer(choice, [nn.Parameter(torch.zeros(2, 2))])
                assert optimizer is not None, "it has a parameter"
                schedule = make_schedule(train, optimizer, choice.name)
                if schedule is not None:
                    advance(schedule, steps_done)
                    self._stand_ins.append((optimizer, schedule))
            self._optimizers[choice.name or ALL] = optimizer

    def now(self) -> dict[str, float]:
        """Learning rates now, by the names of the groups; that of the only group under `all`."""
        return {name: float(optimizer.param_groups[0]["lr"]) for name, optimizer in self._optimizers.items()}

    def step(self) -> None:
        """An update is done; this rank's own schedules are moved by whoever trains."""
        for optimizer, schedule in self._stand_ins:
            optimizer.step()  # of a parameter without a gradient; schedules expect it before them
            schedule.step()
