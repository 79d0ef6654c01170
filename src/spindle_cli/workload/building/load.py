"""Build a workload from its source, with the initial values that its seed gives.

With several islands (`train.local_sgd`) it is built as each of them trains it: on its part of every batch.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import IterableDataset

from spindle_cli.errors import InputError, WorkloadError
from spindle_cli.workload.building.checks import check_workload
from spindle_cli.workload.building.source import Source, resolve
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.initial.matching import InitialValues, fill_whole, find_initial
from spindle_cli.workload.parameters import flow_modules
from spindle_cli.workload.refuse import place_of_error
from spindle_cli.workload.types import FlowTask, Task, Workload
from spindle_cli.workload.values.step_values import StepValues


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
    """Seed torch and call the function; with `train.local_sgd`, the workload as each island trains it.

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
    built = as_on_an_island(check_workload(workload, source.text), source.train, source.text)
    StepValues.of(built).reset()
    _remember(built, source.text)
    return built


_built: list[tuple[str, str, str, weakref.ref[nn.Module]]] = []


def _remember(workload: Workload, source: str) -> None:
    _built[:] = [each for each in _built if each[-1]() is not None]
    _built.extend((source, task, name, weakref.ref(module)) for task, name, module in modules_of(workload))


def modules_of(workload: Workload) -> list[tuple[str, str, nn.Module]]:
    """By their tasks' names, with their own names in the task ('': it is the task's own)."""
    return [
        (task.name, name, module)
        for task in workload.all_tasks
        for module, name in (
            flow_modules(task).items() if isinstance(task, FlowTask) else [(task.module, "")]
        )
    ]


def built_modules(source: str) -> list[tuple[str, str, nn.Module]]:
    """The modules of all builds of a workload in this process that somebody still holds, with their tasks and
    names.
    """
    found = [(task, name, module()) for text, task, name, module in _built if text == source]
    return [(task, name, module) for task, name, module in found if module is not None]


def as_on_an_island(workload: Workload, train: TrainSettings, where: str) -> Workload:
    """Give a workload's modules in tasks with an island's part of their batches; without islands, the
    workload itself.

    An island's part of a batch is a batch by itself: of the batches of this size, in their order, the islands
    take one each. So a loss is the mean over an island's part.

    Raises:
        WorkloadError: a batch cannot be divided, or a task cannot be trained so.
    """
    asked = train.local_sgd
    if asked is None:
        return workload
    tasks = []
    for task in workload.tasks:
        _require_divisible(task, train, asked.islands, where)
        tasks.append(replace(task, batch_size=task.batch_size // asked.islands))
    return replace(workload, tasks=tasks)


def _require_divisible(task: Task | FlowTask, train: TrainSettings, islands: int, where: str) -> None:
    named = f"{where}: task {task.name!r}"
    if task.batch_size % islands:
        raise WorkloadError(
            f"{named}: its batch of {task.batch_size} samples cannot be divided between {islands} islands "
            "(train.local_sgd)",
            hint=f"Make batch_size a multiple of {islands}: islands take equal parts.",
        )
    if task.reduction == "sum":
        raise WorkloadError(
            f"{named}: its loss is a sum over the batch (reduction='sum'), which does not go with "
            "train.local_sgd: an island's part of the batch has a smaller one",
            hint="Let the task give the mean over its samples.",
        )
    is_stream = isinstance(task.dataset, IterableDataset) or not hasattr(task.dataset, "__getitem__")
    if is_stream or train.loader.of(task.name).workers:
        what = "its dataset is iterable" if is_stream else "it has loader workers (train.loader)"
        raise WorkloadError(
            f"{named}: {what}, which does not go with train.local_sgd: islands take every so many-th batch",
            hint="Give it a map-style dataset, and workers: 0.",
        )
