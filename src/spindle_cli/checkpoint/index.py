"""A checkpoint's index: what is in which of its files, and the checksums of all of them. No torch.

`checkpoint.json` says it, and has the SHA-256 of every shard, and of the one file of weights that are not
trained, which all of a run's checkpoints share. `SHA256SUMS` has that of the index itself, and those of the
others once more, so that `sha256sum -c SHA256SUMS` looks at all of it without Spindle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, Field

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact, Model, read_data
from spindle_cli.files.request import SeenData
from spindle_cli.files.tensors import DTYPES
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.settings.updates import OptimizerChoice

INDEX_FILE = "checkpoint.json"
SUMS_FILE = "SHA256SUMS"
FROZEN_FILE: Final = "../frozen.safetensors"  # from a checkpoint's folder: beside all of them
EARLIER_SCHEMAS = ("spindle.checkpoint/1", "spindle.checkpoint/2")
MAX_SIZE = 2**48  # of a tensor's dimension: beyond any memory, and far from where sizes overflow


def _known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"expected one of {', '.join(DTYPES)}")
    return name


class SavedTensor(Model):
    """A whole tensor, whichever shards have it.

    Attributes:
        shape: Its sizes.
        dtype: torch's name of its type.
    """

    shape: tuple[Annotated[int, Field(ge=0, le=MAX_SIZE)], ...]
    dtype: Annotated[str, AfterValidator(_known_dtype)]


class Shard(Model):
    """One worker's file in a checkpoint.

    Attributes:
        file: Its name, in the checkpoint's folder.
        num_bytes: Its size.
        keys: Names of tensors, or of boxes of them, `<name>[first:last,...]`.
        sha256: SHA-256 of its bytes.
    """

    file: Annotated[str, Field(pattern=r"^rank-[0-9]{5,}\.safetensors$")]  # in the folder, and nowhere else
    num_bytes: Annotated[int, Field(ge=0)]
    keys: tuple[str, ...]
    sha256: str


class FrozenFile(Model):
    """The weights that a run does not train, whole: one file for all of its checkpoints.

    Attributes:
        file: Its place, relative to the checkpoint's folder.
        num_bytes: Its size.
        keys: Names of tensors, as checkpoints have them.
        sha256: SHA-256 of its bytes.
    """

    file: Literal["../frozen.safetensors"] = FROZEN_FILE
    num_bytes: Annotated[int, Field(ge=0)]
    keys: tuple[str, ...]
    sha256: str


class TrainedTask(Model):
    """What a task counted for in each step.

    Attributes:
        batch_size: Samples per step.
        weight: Weight of its loss.
        data: What was seen of its dataset; absent: nobody has looked.
    """

    batch_size: int
    weight: float
    data: SeenData | None = None


class SavedGroup(Model):
    """An optimizer group of a run.

    Attributes:
        parameters: Names of its parameters.
        hyperparameters: As of the checkpoint.
        schedule: As of the checkpoint.
    """

    parameters: tuple[str, ...]
    hyperparameters: dict[str, Any] = Field(default_factory=dict)
    schedule: dict[str, Any] = Field(default_factory=dict)


class SavedLossScale(Model):
    """A run's loss scale.

    Attributes:
        scale: What losses are multiplied by.
        growing_steps: For how many steps in a row nothing had overflowed.
    """

    scale: Annotated[float, Field(ge=0)]
    growing_steps: Annotated[int, Field(ge=0, lt=2**31)]


class Checkpoint(Artifact):
    """checkpoint.json: where a run was after `step` steps.

    Attributes:
        step: Steps that were done. The samples of the next one follow from it, the seed and the task.
        plan_sha256: Hash of the plan that the workers ran.
        workload: Where the workload is, as the workers took it.
        fingerprint: The workload's.
        tasks: What each task counted for, by name.
        aliases: The names that each parameter and buffer which tasks share has besides the one that it is
            saved under, '<task>.<dotted name>' like that.
        dtype: What everything was converted to, if anything.
        train: How the workload was trained.
        tensors: Every tensor, by name.
        shards: The workers' files, by rank.
        frozen: The file of weights that the run uses and does not train; absent: there are none. Together
            with the shards it has every element of every tensor once.
        hyperparameters: The optimizer's, as the schedule has left them (the learning rate, a momentum).
        schedule: The schedule's own numbers.
        groups: What each optimizer group had, by name, where `train` has groups; the two above are then
            empty.
        streams: Where each task was whose dataset is a stream.
        step_values: What the next step reads of the numbers that callbacks set (`Task.step_values`).
        loss_scale: The scale of the next step, where losses are scaled.
    """

    KIND: ClassVar[str] = "checkpoint"
    MAJORS: ClassVar[tuple[int, ...]] = (3,)

    schema_: Annotated[Literal["spindle.checkpoint/3"], Field(alias="schema")] = "spindle.checkpoint/3"
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
    frozen: FrozenFile | None = None
    hyperparameters: dict[str, Any] = Field(default_factory=dict)
    schedule: dict[str, Any] = Field(default_factory=dict)
    groups: dict[str, SavedGroup] = Field(default_factory=dict)
    streams: dict[str, Any] = Field(default_factory=dict)
    step_values: dict[str, float] = Field(default_factory=dict)
    loss_scale: SavedLossScale | None = None

    @cached_property
    def choice_of(self) -> Callable[[str], OptimizerChoice | None]:
        """From a saved name to the optimizer settings that it was trained with; None: it was not trained."""
        choices = {choice.name: choice for choice in self.train.choices}
        if self.train.groups is None:
            return lambda _: choices[None]
        of = {name: choices[group] for group, saved in self.groups.items() for name in saved.parameters}
        return of.get

    @property
    def files(self) -> tuple[Shard | FrozenFile, ...]:
        """All that have tensors of it; names are relative to its folder."""
        return self.shards if self.frozen is None else (*self.shards, self.frozen)


def shard_name(rank: int) -> str:
    """A worker's file in every checkpoint."""
    return f"rank-{rank:05d}.safetensors"


def sums_text(index_sha256: str, files: Iterable[Shard | FrozenFile]) -> str:
    """The content of SHA256SUMS, as `sha256sum` writes it."""
    sums = [(index_sha256, INDEX_FILE), *((entry.sha256, entry.file) for entry in files)]
    return "".join(f"{sha256}  {file}\n" for sha256, file in sums)


def read_index(folder: Path) -> Checkpoint:
    """A checkpoint's index, once it is known to be what was written.

    Raises:
        InputError: it or its checksum is missing, it is not what was written, or of another version.
    """
    path, sums = folder / INDEX_FILE, folder / SUMS_FILE
    data = read_data(path)
    earlier = data.get("schema") if isinstance(data, dict) else None
    if earlier in EARLIER_SCHEMAS and not sums.exists():
        raise InputError(
            f"{path}: an earlier version of Spindle wrote it ({earlier}), which this one cannot read: "
            "end the run with that version, or export with it what is trained so far"
        )
    try:
        index_sha256, written = checksum(path), sums.read_bytes()
    except FileNotFoundError as error:
        raise InputError(
            f"{sums}: no such file, so that nobody knows whether {INDEX_FILE} is whole"
        ) from error
    except OSError as error:
        raise InputError(f"{sums}: cannot be read: {error.strerror}") from error
    if not written.startswith(sums_text(index_sha256, ()).encode()):
        raise InputError(f"{path}: not what was written: its checksum in {SUMS_FILE} differs")
    checkpoint = Checkpoint.from_data(data, where=str(path))
    if written != sums_text(index_sha256, checkpoint.files).encode():
        raise InputError(f"{sums}: not what was written: it differs from {INDEX_FILE}")
    return checkpoint


def checksum(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
