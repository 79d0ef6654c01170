"""A checkpoint's index: what is in which of its files, and the checksums of all of them. No torch.

`checkpoint.json` says it, and has the SHA-256 of every shard, and of the one file of weights that are not
trained, which all of a run's checkpoints share. `SHA256SUMS` has that of the index itself, and those of the
others once more, so that `sha256sum -c SHA256SUMS` looks at all of it without Spindle.

Tensors have the names of a flattened state dict: `model.<name>`, `optimizer.state.<name>.<key>`,
`buffers.<rank>.<name>`, `random.<device type>.<rank>`; `<name>` is the user's own, with the task's in front.
A key in a shard is the tensor's name where it has all of it, and `<name>[first:last,...]`, one range for each
dimension, where it has a part (the notation of files/tensors.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, Field

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact, Model, read_data
from spindle_cli.files.request import SeenData
from spindle_cli.files.tensors import DTYPES, Fragment, parse_part_key, part_key
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.settings.updates import OptimizerChoice

# Of a parameter's optimizer state, the moving average of the weights.
AVERAGE_KEY = "ema"
# Of islands that average now and then alone: their last common point, and the outer optimizer's momentum.
COMMON_KEY, OUTER_MOMENTUM_KEY = "common", "outer_momentum"


def model_key(name: str) -> str:
    """Return the name under which a parameter, by its canonical name, is saved."""
    return f"model.{name}"


def state_key(name: str, key: str) -> str:
    """A parameter's optimizer state by the optimizer's own key."""
    return f"optimizer.state.{name}.{key}"


def optimizer_keys(names: Iterable[str]) -> dict[str, list[str]]:
    """Parameter -> the optimizer's keys, of all the names of a checkpoint."""
    keys: dict[str, list[str]] = {}
    for name in names:
        if name.startswith("optimizer.state."):
            parameter, key = _parameter_and_key(name)
            keys.setdefault(parameter, []).append(key)
    return keys


def buffer_key(name: str, rank: int) -> str:
    """Return the name under which one rank's value of a buffer is saved."""
    return f"buffers.{rank}.{name}"


def random_key(device_type: str, rank: int) -> str:
    """Return the name under which the state of a rank's generator is saved."""
    return f"random.{device_type}.{rank}"


def every_name(names: Iterable[str], aliases: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Every name under which a saved tensor can be asked for -> the one under which it is saved.

    Args:
        names: under which tensors are saved.
        aliases: as in `Checkpoint`.

    Returns:
        Also a buffer's name as part of the model, for the value of the first rank that has one.
    """
    saved_names = {name: name for name in names}
    buffers = sorted(map(_rank_and_buffer, (name for name in saved_names if name.startswith("buffers."))))
    for rank, buffer in buffers:
        saved_names.setdefault(model_key(buffer), buffer_key(buffer, rank))
    for name, saved in list(saved_names.items()):
        kind, _, tensor = name.partition(".")
        if kind == "model":
            saved_names.update((model_key(alias), saved) for alias in aliases.get(tensor, ()))
        elif kind == "optimizer":
            parameter, key = _parameter_and_key(name)
            saved_names.update((state_key(alias, key), saved) for alias in aliases.get(parameter, ()))
    return saved_names


def _rank_and_buffer(name: str) -> tuple[int, str]:
    _, rank, buffer = name.split(".", 2)
    return int(rank), buffer


def _parameter_and_key(name: str) -> tuple[str, str]:
    parameter, _, key = name.removeprefix("optimizer.state.").rpartition(".")
    return parameter, key


def model_names(names: Iterable[str]) -> dict[str, None]:
    """Canonical names of the parameters and buffers among saved tensors."""
    parameters = dict.fromkeys(name.removeprefix("model.") for name in names if name.startswith("model."))
    return parameters | dict.fromkeys(
        _rank_and_buffer(name)[1] for name in names if name.startswith("buffers.")
    )


@dataclass(frozen=True)
class Region:
    """Elements [offset, offset + size) of every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return the region that is all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def of_fragment(cls, shape: Sequence[int], fragment: Fragment | None) -> Region:
        """A fragment of a tensor of this shape; None: all of it."""
        whole = cls.whole(shape)
        if fragment is None:
            return whole
        return whole.within(fragment.dim, fragment.first, fragment.last)

    def within(self, dim: int, first: int, last: int) -> Region:
        """The part [first, last) of one dimension of this region."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += first
        sizes[dim] = last - first
        return Region(tuple(offsets), tuple(sizes))

    def key(self, name: str, shape: Sequence[int]) -> str:
        """This part's key in a shard; the tensor has this name and this shape."""
        if self == Region.whole(shape):
            return name
        ends = zip(self.offsets, self.sizes, strict=True)
        return part_key(name, [(first, first + size) for first, size in ends])

    def of_range(self, first: int, last: int) -> Iterator[Region]:
        """The boxes that elements [first, last) of this region, counted row by row, make up, in their order.

        At most 2 d - 1 for d dimensions: what is left of a row, whole rows, and the beginning of a row.
        """
        if first >= last:
            return
        if not self.sizes:
            yield self
            return
        row = prod(self.sizes[1:])
        head, tail = -(-first // row), last // row  # whole rows are [head, tail)
        if first % row:
            end = min(last, head * row)
            yield from self._of_row(head - 1, first - (head - 1) * row, end - (head - 1) * row)
        if head < tail:
            yield self.within(0, head, tail)
        if last % row and tail >= head:
            yield from self._of_row(tail, 0, last - tail * row)

    def _of_row(self, index: int, first: int, last: int) -> Iterator[Region]:
        inner = Region(self.offsets[1:], self.sizes[1:])
        for rest in inner.of_range(first, last):
            yield Region((self.offsets[0] + index, *rest.offsets), (1, *rest.sizes))


def parse_region(key: str) -> tuple[str, Region] | None:
    """The tensor's name, and which part of it: what `Region.key` made of a part; None for a plain name."""
    name, ranges = parse_part_key(key)
    ends = [bounds for bounds in ranges or () if bounds is not None]
    if not ends or ranges is None or len(ends) < len(ranges):
        return None
    return name, Region(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


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
