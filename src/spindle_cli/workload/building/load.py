"""Build a workload from its source, with the initial values that its seed gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.errors import InputError, WorkloadError
from spindle_cli.workload.building.source import Source, resolve
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.initial.matching import InitialValues, fill_whole, find_initial
from spindle_cli.workload.refuse import place_of_error
from spindle_cli.workload.types import FlowTask, Task, Workload


@dataclass(frozen=True)
class LoadedWorkload:
    """A built workload, how it is trained, and where it came from.

    `initial`: which of its values are not those of the build, but in files.
    """

    workload: Workload
    train: TrainSettings
    source: str
    initial: InitialValues = field(default_factory=InitialValues, kw_only=True)


def load(source: str, *, relative_to: Path | None = None) -> LoadedWorkload:
    """Build a workload: torch is seeded with the training seed first, so every process gets the same initial
    values. What the workload file takes from files (`init_from`) is then read.

    Args:
        source: a workload YAML file, 'package.module:function' or 'path/to/file.py:function'.
        relative_to: folder that relative paths start from; the current one if None.

    Raises:
        InputError: no such file, module or function, or a malformed YAML file; or a file of initial values
            that cannot be read or does not fit.
        WorkloadError: the function fails, or what it returns is not a valid workload.
    """
    found = resolve(source, relative_to=relative_to)
    workload = build(found)
    initial = find_initial(found.init_from, workload)
    fill_whole(initial, workload, where=lambda _: True)
    return LoadedWorkload(workload, found.train, source, initial=initial)


def build(source: Source) -> Workload:
    """Seed torch and call the function.

    Raises:
        WorkloadError: the function fails, or what it returns is not a valid workload.
    """
    torch.manual_seed(source.train.seed)
    try:
        workload = source.build(**source.args)
    except InputError as error:
        error.message = f"{source.text}: {error.message}"
        raise
    except Exception as error:
        place = place_of_error(error)
        where = f"{place}: " if place else ""
        raise WorkloadError(
            f"{where}building the workload {source.text!r} failed: {type(error).__name__}: {error}"
        ) from error
    return check_workload(workload, source.text)


def check_workload(workload: Any, where: str) -> Workload:
    """Refuse what is not a usable workload, before anything is traced.

    Raises:
        WorkloadError: naming the task, the value and what was expected.
    """
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"{where}: returned a {type(workload).__name__}, expected a spindle_cli.Workload",
            hint="Let the function end with `return Workload(name=..., tasks=[...], ...)`.",
        )
    if not workload.tasks:
        raise WorkloadError(f"{where}: the workload {workload.name!r} has no tasks")
    for task in workload.all_tasks:
        _check_task(task, where)
    for task in workload.tasks:
        if task.dataset is None:
            raise WorkloadError(
                f"{where}: task {task.name!r} has no dataset to be trained on",
                hint="Give it one; a task that is only evaluated belongs in the workload's `evaluated`.",
            )
    for task in workload.evaluated:
        _check_only_evaluated(task, where)
    names = [task.name for task in workload.all_tasks]
    for name in names:
        if names.count(name) > 1:
            raise WorkloadError(
                f"{where}: {names.count(name)} tasks are named {name!r}", hint="Give each task its own name."
            )
    for key in ("operators", "coupled"):
        for item in getattr(workload, key):
            if not (isinstance(item, type) and issubclass(item, nn.Module)):
                raise WorkloadError(
                    f"{where}: {key}: found {item!r}, expected classes derived from nn.Module"
                )
    return workload


def _check_only_evaluated(task: Task | FlowTask, where: str) -> None:
    where = f"{where}: evaluated: task {task.name!r}"
    if task.eval_dataset is None:
        raise WorkloadError(f"{where} has no eval_dataset", hint="Give it what it is to be evaluated on.")
    if task.dataset is not None:
        raise WorkloadError(
            f"{where} has a dataset, and is never trained",
            hint="Leave its dataset out; or list it in the workload's `tasks`, to train it.",
        )


def _check_task(task: Any, where: str) -> None:
    if not isinstance(task, Task | FlowTask):
        raise WorkloadError(
            f"{where}: tasks: found a {type(task).__name__}, expected spindle_cli.Task or FlowTask"
        )
    if not isinstance(task.name, str) or not task.name or "/" in task.name:
        raise WorkloadError(f"{where}: a task is named {task.name!r}; expected a name without '/'")
    where = f"{where}: task {task.name!r}"
    if isinstance(task, Task) and not isinstance(task.module, nn.Module):
        raise WorkloadError(f"{where}: module is a {type(task.module).__name__}, expected an nn.Module")
    if not isinstance(task.batch_size, int) or isinstance(task.batch_size, bool) or task.batch_size < 1:
        raise WorkloadError(
            f"{where}: batch_size is {task.batch_size!r}, expected a whole number of samples, at least 1"
        )
    if not isinstance(task.weight, int | float) or not math.isfinite(task.weight):
        raise WorkloadError(f"{where}: weight is {task.weight!r}, expected a finite number")
    if not isinstance(task.absent, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in task.absent.items()
    ):
        raise WorkloadError(
            f"{where}: absent is {task.absent!r:.80}, expected a tensor of one sample by field",
            hint="Such as absent={'image': torch.zeros(3, 224, 224)}.",
        )
    if not isinstance(task.metrics, Mapping) or not all(
        isinstance(name, str) and callable(metric) for name, metric in task.metrics.items()
    ):
        raise WorkloadError(
            f"{where}: metrics is {task.metrics!r:.80}, expected a function by name",
            hint="Such as metrics={'mean_score': lambda out: out['score'].mean()}.",
        )
    if task.reduction not in ("mean", "sum"):
        raise WorkloadError(f"{where}: reduction is {task.reduction!r}, expected 'mean' or 'sum'")
