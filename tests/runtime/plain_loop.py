"""What every run is compared with: the user's own modules, trained by a plain loop in one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.batches import Batches
from spindle_cli.workload.load import load
from spindle_cli.workload.parameters import ParameterTable


@dataclass(frozen=True)
class PlainRun:
    """Per step: the tasks' losses. After the first step: gradients. After the last: parameters. By canonical
    name.
    """

    losses: list[dict[str, float]]
    gradients: dict[str, Tensor]
    final: dict[str, Tensor]


def train_plainly(source: str, steps: int, dtype: torch.dtype) -> PlainRun:
    """Train `steps` steps with the optimizer of the source's train settings."""
    loaded = load(source)
    parameters = ParameterTable.of(analyse(loaded.workload)).parameters
    tasks = loaded.workload.tasks
    for task in tasks:
        task.module.to(dtype)
    train = loaded.train
    optimizer = getattr(torch.optim, train.optimizer)(
        list(parameters.values()), lr=train.lr, **train.optimizer_args
    )
    schedule = train.schedule
    scheduler = schedule and getattr(torch.optim.lr_scheduler, schedule.name)(optimizer, **schedule.arguments)
    batches = {task.name: Batches(task, train.seed) for task in tasks}
    losses: list[dict[str, float]] = []
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        losses.append({})
        count = train.accumulate
        for task, index in ((task, count * step + i) for task in tasks for i in range(count)):
            batch = batches[task.name].rows(index, 0, task.batch_size)
            batch = {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}
            result = task.module(**batch)
            loss = result["loss"] if isinstance(result, dict) else result
            loss = loss / (count if task.reduction == "mean" else 1)
            (task.weight * loss).backward()
            losses[-1][task.name] = losses[-1].get(task.name, 0.0) + loss.item()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        if train.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), train.clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return PlainRun(losses, gradients, {name: p.detach().clone() for name, p in parameters.items()})
