"""Write checkpoints: each rank the parameters that it is the first to hold, and what is its own.

No rank ever holds more than its part. All ranks write at once; the folder gets its name when the last has
written its shard.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from spindle_cli.artifact import write_json
from spindle_cli.checkpoint_files import (
    INDEX_FILE,
    Checkpoint,
    Shard,
    TrainedTask,
    checkpoint_folder,
    checksum,
    forget_old,
    shard_name,
)
from spindle_cli.errors import InputError
from spindle_cli.request import RunRequest
from spindle_cli.run_files import CHECKPOINTS_DIR
from spindle_cli.runtime.train_state import Numbers, TrainState, numbers_of, tensors_of
from spindle_cli.workload.parameters import ParameterTable

T = TypeVar("T")


@dataclass(frozen=True)
class Written:
    """What a rank tells of its part of a checkpoint. `problem`: why there is no shard."""

    shard: Shard | None
    problem: str | None
    numbers: Numbers | None


class Checkpoints:
    """One rank's side of a run's checkpoints."""

    def __init__(self, request: RunRequest, state: TrainState, rank: int) -> None:
        """Collective: ranks tell each other what they hold, and whether they write into one folder.

        Raises:
            InputError: checkpoints are asked for, but the ranks' folders are on different disks.
        """
        self._request = request
        self._state = state
        self._rank = rank
        self._saved_step: int | None = None
        held = _gather(tuple(state.model.parameters))
        earlier = {name for names in held[:rank] for name in names}
        self._owned = [name for name in state.model.parameters if name not in earlier]
        self.possible = _one_folder(request.run_dir / CHECKPOINTS_DIR, rank)
        if request.checkpoint_every is not None and not self.possible:
            raise InputError(
                f"{request.run_dir}: the nodes do not share this folder, so no checkpoint can be written",
                hint="Choose a folder on a shared disk with --run-dir, or leave --checkpoint-every out.",
            )

    def is_due(self, step: int) -> bool:
        """Whether to save after `step` steps: after one of every K."""
        every = self._request.checkpoint_every
        return every is not None and step % every == 0

    def save(self, step: int) -> None:
        """Save after `step` steps, unless that is done; collective. Older ones beyond those kept are deleted.

        Raises:
            InputError: on every rank, where one of them cannot write.
        """
        if not self.possible or step == self._saved_step:
            return
        target = checkpoint_folder(self._request.run_dir, step)
        aside = target.with_name(f".{target.name}.tmp")
        self._on_first_rank(lambda: _make_anew(aside))
        written = _gather(self._write_shard(aside))
        _require_all([part.problem for part in written if part.problem is not None])
        self._on_first_rank(lambda: self._publish(self._index(step, written), aside, target))
        self._saved_step = step

    def _write_shard(self, folder: Path) -> Written:
        path = folder / shard_name(self._rank)
        tensors = tensors_of(self._state, self._owned)
        try:
            save_file(tensors, path)
            _sync(path)
            shard = Shard(
                file=path.name,
                num_bytes=path.stat().st_size,
                keys=tuple(tensors),
                sha256=checksum(path),
            )
        except (OSError, SafetensorError) as error:
            return Written(None, f"{path}: cannot be written: {error}", None)
        return Written(shard, None, numbers_of(self._state))

    def _index(self, step: int, written: Sequence[Written]) -> Checkpoint:
        """Numbers are the same on every rank that trains anything; the first such rank's are taken."""
        numbers = next((part.numbers for part in written if part.numbers is not None), Numbers({}, {}))
        graph = self._state.model.graph
        return Checkpoint(
            step=step,
            plan_sha256=self._state.model.program.plan.sha256(),
            workload=self._request.workload,
            fingerprint=graph.fingerprint,
            tasks={
                task.name: TrainedTask(batch_size=task.batch_size, weight=task.weight)
                for task in graph.workload.tasks
            },
            aliases=ParameterTable.of(graph).aliases,
            dtype=self._request.dtype,
            train=self._state.model.train,
            shards=tuple(part.shard for part in written if part.shard is not None),
            hyperparameters=numbers.hyperparameters,
            schedule=numbers.schedule,
        )

    def _publish(self, checkpoint: Checkpoint, aside: Path, target: Path) -> None:
        write_json(aside / INDEX_FILE, checkpoint)
        if target.exists():  # one that could not be gone on from, or a run's end that is trained on
            shutil.rmtree(target)
        aside.rename(target)
        _sync(target.parent)
        forget_old(self._request.run_dir, checkpoint.step, self._request.keep)

    def _on_first_rank(self, work: Callable[[], None]) -> None:
        """Do something on rank 0 while the others wait; what fails there fails everywhere."""
        problem: str | None = None
        if self._rank == 0:
            try:
                work()
            except (OSError, InputError) as error:
                problem = str(error)
        _require_all([told for told in _gather(problem) if told is not None])


def _gather(own: T) -> list[T]:
    """Every rank's, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def _require_all(problems: list[str]) -> None:
    if problems:
        raise InputError(
            f"the checkpoint cannot be saved: {problems[0]}",
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
    _require_all([told for told in _gather(problem) if told is not None])
    seen = all(_gather(token.exists()))
    if rank == 0:
        token.unlink()
    return seen


def _make_anew(folder: Path) -> None:
    if folder.exists():  # an earlier attempt that was cut short
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
