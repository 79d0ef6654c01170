"""A run's checkpoints as files: what is in one, which are whole, and which are kept. No torch.

`<run>/checkpoints/step-NNNNNN/` holds a shard per worker, `rank-NNNNN.safetensors`, and `checkpoint.json`,
which says what is in which. It is written beside its place and renamed, so that a folder with this name is
whole unless something has damaged it since.

Tensors have the names of names.py; a shard has all of one or boxes of it, by the keys of
regions.py.
"""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact, Model, read_data
from spindle_cli.files.run_files import CHECKPOINTS_DIR, model_path
from spindle_cli.workload.file import TrainSettings

INDEX_FILE = "checkpoint.json"
EARLIER_SCHEMA = "spindle.checkpoint/1"
MAX_READERS = 8


class SavedTensor(Model):
    """A whole tensor, whichever shards have it. `dtype`: torch's name of it."""

    shape: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: str


class Shard(Model):
    """One worker's file in a checkpoint, with its size, its keys, and the SHA-256 of its bytes. A key is the
    name of a tensor, or of a box of one.
    """

    file: str
    num_bytes: Annotated[int, Field(ge=0)]
    keys: tuple[str, ...]
    sha256: str


class TrainedTask(Model):
    """What a task counted for in each step."""

    batch_size: int
    weight: float


class Checkpoint(Artifact):
    """checkpoint.json: where a run was after `step` steps.

    Attributes:
        step: steps that were done. The samples of the next one follow from it, the seed and the task.
        plan_sha256: of the plan that the workers ran.
        workload: where it is, as the workers took it. `fingerprint`: of it, and `tasks`: by name.
        aliases: of each parameter and buffer that tasks share, the names that it has besides the one that it
            is saved under, '<task>.<dotted name>' like that.
        dtype: what everything was converted to, if anything.
        train: how it was trained.
        tensors: by name.
        shards: by rank; together they have every element of every tensor once.
        hyperparameters: of the optimizer as the schedule has left them (the learning rate, a momentum).
        schedule: the schedule's own numbers.
    """

    KIND: ClassVar[str] = "checkpoint"
    MAJOR: ClassVar[int] = 2

    schema_: Annotated[Literal["spindle.checkpoint/2"], Field(alias="schema")] = "spindle.checkpoint/2"
    step: Annotated[int, Field(ge=1)]
    plan_sha256: str
    workload: str
    fingerprint: str | None = None
    tasks: dict[str, TrainedTask] = Field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    dtype: str | None = None
    train: TrainSettings
    tensors: dict[str, SavedTensor] = Field(default_factory=dict)
    shards: tuple[Shard, ...] = ()
    hyperparameters: dict[str, Any] = Field(default_factory=dict)
    schedule: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest whole checkpoint of a run. `skipped`: newer ones that are not, each with why, for people."""

    folder: Path
    checkpoint: Checkpoint
    skipped: tuple[str, ...]


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return model_path(run_dir, step).parent


def shard_name(rank: int) -> str:
    """A worker's file in every checkpoint."""
    return f"rank-{rank:05d}.safetensors"


def find_checkpoint(run_dir: Path, *, step: int | None = None, reads_all: bool = False) -> FoundCheckpoint:
    """The newest checkpoint that is whole.

    Args:
        run_dir: the run's folder.
        step: take the one after this step, and no other.
        reads_all: compare every shard's checksum too, not only its size.

    Raises:
        InputError: there is none; says what is wrong with those that are there.
    """
    skipped: list[str] = []
    for number, folder in reversed(_folders(run_dir)):
        if step is not None and number != step:
            continue
        try:
            checkpoint = read_index(folder)
        except InputError as error:
            skipped.append(f"{folder.name} cannot be used: {error.message}")
            continue
        problem = _damage(folder, checkpoint, reads_all=reads_all)
        if problem is None:
            return FoundCheckpoint(folder, checkpoint, tuple(skipped))
        skipped.append(f"{folder.name} cannot be used: {problem}")
    raise InputError(
        "\n  ".join((f"{run_dir}: there is no checkpoint to go on from", *skipped)),
        hint="Start the run anew; with --checkpoint-every it saves one every so many steps.",
    )


def read_index(folder: Path) -> Checkpoint:
    """A checkpoint's index.

    Raises:
        InputError: it is missing, malformed, or of another version.
    """
    path = folder / INDEX_FILE
    data = read_data(path)
    if isinstance(data, dict) and data.get("schema") == EARLIER_SCHEMA:
        raise InputError(
            f"{path}: an earlier version of Spindle wrote it ({EARLIER_SCHEMA}), which this one cannot read: "
            "end the run with that version, or export with it what is trained so far"
        )
    return Checkpoint.from_data(data, where=str(path))


def checksum(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_steps_left(found: FoundCheckpoint, total_steps: int) -> None:
    """Refuse to go on from a checkpoint at or behind the run's end.

    Raises:
        InputError: it is.
    """
    if found.checkpoint.step >= total_steps:
        raise InputError(
            f"{found.folder}: the run has done {found.checkpoint.step} steps already, "
            f"and is to end after {total_steps}",
            hint="Give the number of steps at which it is to end with --steps.",
        )


def require_same_workload(checkpoint: Checkpoint, fingerprint: str, where: Path) -> None:
    """Refuse to resume a run with another workload.

    Raises:
        InputError: it is another.
    """
    if checkpoint.fingerprint not in (None, fingerprint):
        raise InputError(
            f"{where}: the run has other tasks than the plan: its workload was {checkpoint.fingerprint}, "
            f"the plan's is {fingerprint}",
            hint="Begin a run in a folder of its own with --from, which takes over what both have.",
        )


def locate_checkpoint(path: Path) -> tuple[Path, int | None]:
    """A run's folder, or that of one of its checkpoints, as the run's folder and a step; None: the newest."""
    number = path.name.removeprefix("step-")
    if path.parent.name == CHECKPOINTS_DIR and number.isdecimal():
        return path.parent.parent, int(number)
    return path, None


def forget_old(run_dir: Path, newest_step: int, keep: int) -> None:
    """Delete all but the last `keep` checkpoints up to `newest_step`.

    Raises:
        OSError: one cannot be deleted.
    """
    until = [folder for step, folder in _folders(run_dir) if step <= newest_step]
    for folder in until[:-keep]:
        shutil.rmtree(folder)


def _folders(run_dir: Path) -> list[tuple[int, Path]]:
    """Every checkpoint's folder, by step, whole or not."""
    found = [
        (int(number), folder)
        for folder in (run_dir / CHECKPOINTS_DIR).glob("step-*")
        if (number := folder.name.removeprefix("step-")).isdecimal()
    ]
    return sorted(found)


def _damage(folder: Path, checkpoint: Checkpoint, *, reads_all: bool) -> str | None:
    """What is wrong with a checkpoint's shards; None: nothing."""
    for shard in checkpoint.shards:
        path = folder / shard.file
        if not path.is_file():
            return f"{shard.file} is missing"
        if (size := path.stat().st_size) != shard.num_bytes:
            return f"{shard.file} has {size} bytes; {shard.num_bytes} were written"
    if not reads_all:
        return None
    # One thread each: hashing lets others run meanwhile.
    with ThreadPoolExecutor(max_workers=MAX_READERS) as readers:
        wrong = readers.map(partial(_wrong_checksum, folder), checkpoint.shards)
        return next((problem for problem in wrong if problem is not None), None)


def _wrong_checksum(folder: Path, shard: Shard) -> str | None:
    try:
        found = checksum(folder / shard.file)
    except OSError as error:
        return f"{shard.file} cannot be read: {error.strerror}"
    if found == shard.sha256:
        return None
    return f"{shard.file} is not what was written: its checksum differs"
