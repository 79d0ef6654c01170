"""When a run's checkpoints are saved, and that all ranks agree on it.

No rank ever holds more than its part. All ranks write at once; the folder gets its name when the last has
written its shard (checkpoint_writer.py). With `async_checkpoints` a rank copies its part first, and writes
the copy while training goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from spindle_cli.checkpoint.files import checkpoint_folder
from spindle_cli.checkpoint.index import Checkpoint, SavedGroup, SavedLossScale, TrainedTask
from spindle_cli.errors import InputError
from spindle_cli.files.request import RunRequest
from spindle_cli.files.run_files import CHECKPOINTS_DIR
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.runtime.saving.frozen import FrozenWeights, find_frozen
from spindle_cli.runtime.saving.train_state import TrainState, held_by, numbers_of
from spindle_cli.workload.graph import ParameterTable

if TYPE_CHECKING:
    from spindle_cli.runtime.saving.checkpoint_writer import PartsSavePlanner, ShardWriter


T = TypeVar("T")


class Checkpoints:
    """One rank's side of a run's checkpoints."""

    def __init__(
        self,
        request: RunRequest,
        state: TrainState,
        rank: int,
        began: int,
        streams: Mapping[str, Any] | None = None,
        step_values: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Collective: ranks tell each other whether they write into one folder.

        Args:
            began: steps that were done when these workers were started.
            streams: where those are that this rank takes samples of, behind the step that is saved; it
                changes from step to step.
            step_values: gives those that callbacks set, as the next step reads them.

        Raises:
            InputError: checkpoints are asked for, but the ranks' folders are on different disks.
        """
        self._request = request
        self._state = state
        self._rank = rank
        self._began = began
        self._streams: Mapping[str, Any] = {} if streams is None else streams
        self._step_values = step_values
        self._saved: frozenset[int] = frozenset()  # after these steps, by these workers
        self._under_way: int | None = None  # after this step, in the background
        self._whole: list[int] = []  # of which nobody was told
        self.possible = _one_folder(request.run_dir / CHECKPOINTS_DIR, rank)
        if request.checkpoint_every is not None and not self.possible:
            raise InputError(
                f"{request.run_dir}: the nodes do not share this folder, so no checkpoint can be written",
                hint="Choose a folder on a shared disk with --run-dir, or leave --checkpoint-every out.",
            )

        in_background = request.async_checkpoints and self.possible
        self._frozen: FrozenWeights | None = None  # known from the first save on
        self._background = BackgroundSaves(request.timeout_s) if in_background else None

    def is_due(self, step: int) -> bool:
        """Whether to save after `step` steps: after one of every K."""
        every = self._request.checkpoint_every
        return every is not None and step % every == 0

    def save(self, step: int) -> None:
        """Save after `step` steps, unless that is done; collective. Older ones beyond those kept are deleted.

        In the background this waits for the save before, and until what is saved is copied.

        Raises:
            InputError: on every rank, where one of them cannot write; in the background, maybe later by
                another method.
        """
        self.finish()
        if not self.possible or step in self._saved:
            return
        if self._frozen is None:
            request, state = self._request, self._state
            own_step = self._began if request.resume else 0
            self._frozen = find_frozen(request.run_dir, own_step, state.model, state.whole)
        # Its import takes most of a second, which a run that saves nothing need not wait for.
        from spindle_cli.runtime.saving.checkpoint_writer import PartsSavePlanner, ShardWriter

        target = checkpoint_folder(self._request.run_dir, step)
        scale = None if self._state.loss_scale is None else self._state.loss_scale.saved()
        make_outline, keep = (
            partial(self._outline, step, scale, dict(self._step_values())),
            self._request.keep,
        )
        writer = ShardWriter(target, self._rank, make_outline, keep, self._saved, self._began)
        copied = None if self._background is None else threading.Event()
        held, numbers = held_by(self._state, self._rank), numbers_of(self._state)
        planner = PartsSavePlanner(held, numbers, copied, self._streams)
        if self._background is None or copied is None:
            _save(writer, planner, host_group())
            self._whole.append(step)
        else:
            self._under_way = step
            self._background.start(partial(_save, writer, planner, self._background.group), copied)
        self._saved |= {step}

    def check(self) -> None:
        """Raise InputError where a save in the background has failed."""
        if self._background is not None:
            self._background.check()

    def finish(self) -> None:
        """Wait for the save in the background, if there is one; raises InputError where it fails."""
        if self._background is not None:
            self._background.finish()
            if self._under_way is not None:
                self._whole.append(self._under_way)
                self._under_way = None

    def take_whole(self) -> tuple[int, ...]:
        """After which steps checkpoints are whole since this was called last. One in the background counts
        when it has been waited for: then it is there on every rank.
        """
        taken, self._whole = tuple(self._whole), []
        return taken

    def finish_after(self, error: Exception) -> None:
        """Finish what is being saved though training has failed. Where the save fails too, the error says so
        in a note.
        """
        try:
            self.finish()
        except Exception as second:
            error.add_note(str(second))

    def _outline(self, step: int, scale: SavedLossScale | None, step_values: dict[str, float]) -> Checkpoint:
        model, graph, frozen = self._state.model, self._state.model.graph, self._frozen
        assert frozen is not None, "known before anything is saved"
        return Checkpoint(
            step=step,
            plan_sha256=model.program.plan.sha256(),
            workload=self._request.workload,
            fingerprint=graph.fingerprint,
            tasks={
                task.name: TrainedTask(
                    batch_size=task.batch_size,
                    weight=task.weight,
                    data=self._request.datasets.get(task.name),
                )
                for task in graph.workload.tasks
            },
            aliases=ParameterTable.of(graph).aliases,
            dtype=self._request.dtype,
            train=model.train,
            groups={name: SavedGroup(parameters=names) for name, names in model.groups.names().items()},
            tensors=frozen.tensors,
            frozen=frozen.file,
            loss_scale=scale,
            step_values=step_values,
        )


def _save(writer: ShardWriter, planner: PartsSavePlanner, group: dist.ProcessGroup | None) -> None:
    """Raises InputError: on every rank, where one of them cannot write."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from spindle_cli.checkpoint.tensors import plain_errors

    try:
        with plain_errors():
            save({}, storage_writer=writer, planner=planner, process_group=group)
    except InputError as error:
        raise _cannot_be_saved(error.message) from error


def _gather(value: T) -> list[T]:
    """Return every rank's value, by rank. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group=host_group())
    return gathered


def _cannot_be_saved(problem: str) -> InputError:
    return InputError(
        f"the checkpoint cannot be saved: {problem}",
        hint="Make room, or make the folder writable; then go on from the one before with --resume.",
    )


def _one_folder(folder: Path, rank: int) -> bool:
    """Whether all ranks see the same folder: what rank 0 puts there, the others find."""
    token = folder / ".shared"
    problem: str | None = None
    if rank == 0:
        try:
            folder.mkdir(exist_ok=True)
            token.touch()
        except OSError as error:
            problem = f"{folder}: {error.strerror}"
    for told in _gather(problem):
        if told is not None:
            raise _cannot_be_saved(told)
    seen = all(_gather(token.exists()))
    if rank == 0:
        token.unlink()
    return seen


class BackgroundSaves:
    """One save at a time, by a thread.

    `group`: a communicator of its own, since another thread must not use those of training.
    """

    def __init__(self, timeout_s: float) -> None:
        """Make the group that saves go over in the background. Collective."""
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def start(self, save: Callable[[], None], copied: threading.Event) -> None:
        """Begin a save, and return when what it saves is copied. Raises what has failed by then."""
        assert self._pending is None, "one at a time"
        self._pending = self._thread.submit(save)
        self._pending.add_done_callback(lambda _: copied.set())  # it may fail before it copies
        copied.wait()
        self.check()

    def check(self) -> None:
        """Raise what a save has failed with, if it has."""
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is under way. Raises what it has failed with."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
