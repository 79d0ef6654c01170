"""Where a run starts: anew, from its own newest checkpoint, or from another run's, maybe of other tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.checkpoint.carry_over import CarryOver, require_same_run, settings_of_run, task_of
from spindle_cli.checkpoint.files import StoredCheckpoint, find_checkpoint, require_steps_left
from spindle_cli.checkpoint.index import Checkpoint, TrainedTask, every_name, model_key
from spindle_cli.errors import InputError
from spindle_cli.files.request import RunRequest, SeenData
from spindle_cli.files.run_files import has_checkpoints
from spindle_cli.launch.checks import AnalysedWorkload

if TYPE_CHECKING:
    from spindle_cli.workload.types import FlowTask, Task

# Settings that say nothing of the model or of what is trained.
_UNSAID = ("steps", "shard_optimizer")


@dataclass(frozen=True)
class StartPoint:
    """The checkpoint that a run goes on from. `is_own`: the run's, and not another's.

    `lines`: what is taken over from another run and what is not, data that has changed, and what begins anew
    as no checkpoint has it, for people.
    """

    stored: StoredCheckpoint
    is_own: bool
    lines: tuple[str, ...] = ()

    def describe(self) -> str:
        """Where the run goes on, as a line for people."""
        folder: Path = self.stored.folder
        if self.is_own:
            return "\n  ".join((f"going on from {folder}", *self.lines))
        return "\n  ".join(
            (f"beginning from {folder}, after step {self.stored.checkpoint.step}", *self.lines)
        )


def find_start(
    request: RunRequest,
    workload: AnalysedWorkload,
    total_steps: int,
    datasets: Mapping[str, SeenData],
    *,
    or_anew: bool,
    allows_changed_data: bool,
) -> StartPoint | None:
    """The checkpoint from which a run will go on; None where it starts anew.

    Args:
        datasets: what is seen of each task's data now.
        or_anew: it starts anew also where it was to go on, but has saved none.
        allows_changed_data: it goes on though its data is another than before.

    Raises:
        InputError: there is none, or it is at the run's end already, or it cannot be taken over; or tasks,
            train settings or a task's data have changed.
        WorkloadError: the optimizer cannot be made.
    """
    if request.resume and (has_checkpoints(request.run_dir) or not (or_anew or request.begin_from)):
        stored = find_checkpoint(request.run_dir, reads_all=True)
        train = settings_of_run(workload.train, request.dtype)
        groups = workload.groups.names()
        fingerprint = workload.graph.fingerprint
        require_same_run(stored.checkpoint, fingerprint, train, groups, request.dtype, stored.folder)
        require_steps_left(stored, total_steps)
        lines = changed_data(stored.checkpoint, datasets)
        if lines and not allows_changed_data:
            raise InputError(
                "\n  ".join((f"{stored.folder}: the data is not what the run was trained on:", *lines)),
                hint="Put it back, or go on with what is there now with --allow-changed-data.",
            )
        return StartPoint(stored, is_own=True, lines=(*lines, *workload.graph.kept))
    if request.begin_from is None:
        return None
    stored = find_checkpoint(request.begin_from, step=request.begin_step, reads_all=True)
    require_steps_left(stored, total_steps)
    _require_outer_step(stored)
    lines = (*_take_over(stored, workload), *changed_data(stored.checkpoint, datasets))
    return StartPoint(stored, is_own=False, lines=lines)


def _require_outer_step(stored: StoredCheckpoint) -> None:
    """Refuse to begin from where islands have different models.

    Raises:
        InputError: the checkpoint is from between two outer steps.
    """
    local_sgd, step = stored.checkpoint.train.local_sgd, stored.checkpoint.step
    if local_sgd is not None and not local_sgd.has_outer_step(step):
        raise InputError(
            f"{stored.folder}: step {step} is between two outer steps, of which there is one after "
            f"every {local_sgd.every} steps (train.local_sgd): islands have different models there",
            hint=f"Name a checkpoint of that run after a multiple of {local_sgd.every} steps, or go on with "
            "the run until then.",
        )


def changed_data(checkpoint: Checkpoint, datasets: Mapping[str, SeenData]) -> tuple[str, ...]:
    """Tasks whose data is another than when the checkpoint was saved, with how, for people."""
    from spindle_cli.training.data.streams import changes

    before = {name: task.data for name, task in checkpoint.tasks.items()}
    return tuple(
        f"task {name}: {line}"
        for name, now in datasets.items()
        if (seen := before.get(name)) is not None
        for line in changes(seen, now)
    )


def _take_over(stored: StoredCheckpoint, workload: AnalysedWorkload) -> tuple[str, ...]:
    """What is taken over, after making sure that it can be."""
    from spindle_cli.checkpoint.carry_over import carried_over, require_same_optimizer

    checkpoint = stored.checkpoint
    carried = carried_over(checkpoint, workload.graph)
    if not carried.kept:
        raise InputError(
            f"{stored.folder}: nothing in it has a name that {workload.source} knows",
            hint="Names are '<task>.<name in the task's module>'; give a task that goes on its old name.",
        )
    require_same_optimizer(checkpoint, carried, workload.groups, stored.folder)
    _require_same_shapes(stored, carried, workload)
    return tuple(_describe(checkpoint, carried, workload))


def _require_same_shapes(stored: StoredCheckpoint, carried: CarryOver, workload: AnalysedWorkload) -> None:
    from spindle_cli.workload.graph import ParameterTable

    table = ParameterTable.of(workload.graph)
    saved = every_name(stored.checkpoint.tensors, stored.checkpoint.aliases)
    for name, saved_as in carried.kept.items():
        kind = "parameter" if name in table.parameters else "buffer"
        wanted = tuple((table.parameters if name in table.parameters else table.buffers)[name].shape)
        shape = stored.checkpoint.tensors[saved[model_key(saved_as)]].shape
        if shape != wanted:
            was = "" if name == saved_as else f" (saved as {saved_as})"
            raise InputError(
                f"{stored.folder}: {kind} {name}{was} has shape {shape}; the workload's has {wanted}",
                hint="Give it its old shape to take it over, or another name to begin it anew.",
            )


def _describe(checkpoint: Checkpoint, carried: CarryOver, workload: AnalysedWorkload) -> Iterator[str]:
    before = checkpoint.tasks
    now = {task.name: task for task in workload.graph.workload.tasks}
    renamed = sum(name != saved_as for name, saved_as in carried.kept.items())
    under = f", {renamed} of them saved under another task's name" if renamed else ""
    yield f"kept, with optimizer state: {_counted(len(carried.kept))}{under}"
    if carried.new:
        yield f"new, from initial values: {_by_task(carried.new, now)}"
    if carried.left_out:
        yield f"left out: {_by_task(carried.left_out, before)}"
    yield from _changed_tasks(before, now)
    old_train, new_train = checkpoint.train.model_dump(), workload.train.model_dump()
    for key, new in new_train.items():
        if key not in _UNSAID and old_train[key] != new:
            yield f"train.{key}: {old_train[key]!r} -> {new!r}"


def _changed_tasks(before: Mapping[str, TrainedTask], now: Mapping[str, Task | FlowTask]) -> Iterator[str]:
    """Say which tasks have ended, which are new, and which have another batch size or weight."""
    for name in before:
        if name not in now:
            yield f"task {name} has ended"
    for name, task in now.items():
        if before and name not in before:
            yield f"task {name} is new"
        for key in ("batch_size", "weight") if name in before else ():
            if (old := getattr(before[name], key)) != (new := getattr(task, key)):
                yield f"task {name}: {key} {old:g} -> {new:g}"


def _by_task(names: Iterable[str], tasks: Iterable[str]) -> str:
    task_names = tuple(tasks)
    counts = Counter(task_of(name, task_names) for name in names)
    return ", ".join(f"{_counted(count)} of task {task}" for task, count in counts.items())


def _counted(count: int) -> str:
    return "1 parameter or buffer" if count == 1 else f"{count} parameters and buffers"
