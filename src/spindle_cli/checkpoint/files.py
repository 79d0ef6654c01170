"""A run's checkpoints as files: which are whole, and which are kept. No torch.

`<run>/checkpoints/step-NNNNNN/` holds a shard per worker, `rank-NNNNN.safetensors`, and the index (index.py),
which says what is in which; weights that are not trained are in one file beside these folders. A folder is
written beside its place and renamed, so that one with this name is whole unless something has damaged it
since.

Tensors have the names of index.py; a shard has all of one or boxes of it, by keys from there.

Whether a checkpoint's files are what was written, known before anything of them is in memory. No torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from spindle_cli.checkpoint.index import (
    Checkpoint,
    FrozenFile,
    Region,
    SavedTensor,
    Shard,
    checksum,
    parse_region,
    read_index,
)
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import parse_json, shown
from spindle_cli.files.run_files import CHECKPOINTS_DIR, model_path
from spindle_cli.files.tensors import DTYPES

MAX_READERS = 8
MAX_HEADER_BYTES = 100_000_000  # what the safetensors library reads
_LENGTH_BYTES = 8
_WITH_FROZEN = ", with the weights that the run does not train"


def damage(folder: Path, checkpoint: Checkpoint, *, reads_all: bool) -> str | None:
    """What is wrong with a checkpoint's shards; None: nothing.

    Args:
        reads_all: compare every shard's checksum too, not only its size and what its header says.
    """
    return next(_problems(folder, checkpoint, reads_all=reads_all), None)


def place_of_key(key: str, tensors: Mapping[str, SavedTensor]) -> tuple[str, Region] | None:
    """The tensor that a shard's key stands for, and the part of it; None: of no tensor, or not in it."""
    if key in tensors:
        return key, Region.whole(tensors[key].shape)
    parsed = parse_region(key)
    if parsed is None or parsed[0] not in tensors:
        return None
    name, region = parsed
    shape = tensors[name].shape
    ends = zip(region.offsets, region.sizes, shape, strict=False)
    fits = len(region.sizes) == len(shape) and all(size >= 0 and at + size <= of for at, size, of in ends)
    return parsed if fits else None


def _problems(folder: Path, checkpoint: Checkpoint, *, reads_all: bool) -> Iterator[str]:
    for shard in checkpoint.files:
        if (problem := _wrong_file(folder, shard)) is not None:
            yield problem
    yield from _wrong_coverage(checkpoint)
    for shard in checkpoint.files:
        if (problem := _wrong_header(folder, shard, checkpoint.tensors)) is not None:
            yield problem
    if reads_all:
        # One thread each: hashing lets others run meanwhile.
        with ThreadPoolExecutor(max_workers=MAX_READERS) as readers:
            problems = readers.map(partial(_wrong_checksum, folder), checkpoint.files)
            yield from (problem for problem in problems if problem is not None)


def _wrong_file(folder: Path, shard: Shard | FrozenFile) -> str | None:
    path = folder / shard.file
    try:
        if not path.is_file():
            return f"{shard.file} is missing{_WITH_FROZEN if isinstance(shard, FrozenFile) else ''}"
        if path.resolve().parent != path.parent.resolve():
            return f"{shard.file} is a link out of the checkpoint's folder"
        size = path.stat().st_size
    except (OSError, RuntimeError) as error:  # links in a circle
        return f"{shard.file} cannot be read: {error}"
    return (
        None if size == shard.num_bytes else f"{shard.file} has {size} bytes; {shard.num_bytes} were written"
    )


def _wrong_coverage(checkpoint: Checkpoint) -> Iterator[str]:
    """Keys that are of no tensor, or given twice; tensors of which elements are missing."""
    elements = dict.fromkeys(checkpoint.tensors, 0)
    seen: set[str] = set()
    for shard in checkpoint.files:
        for key in shard.keys:
            place = place_of_key(key, checkpoint.tensors)
            if place is None:
                yield f"{shard.file} has {shown(key)}, which is no part of a tensor of it"
            elif key in seen:
                yield f"{shard.file} has {shown(key)} a second time"
            else:
                elements[place[0]] += prod(place[1].sizes)
            seen.add(key)
    for name, count in elements.items():
        if count != (whole := prod(checkpoint.tensors[name].shape)):
            yield f"its shards have {count} elements of {shown(name)}, which has {whole}"


def _wrong_header(folder: Path, shard: Shard | FrozenFile, tensors: Mapping[str, SavedTensor]) -> str | None:
    """Whether a shard says of its tensors what the index says, and is as long as they are."""
    try:
        header, begin = _read_header(folder / shard.file)
    except OSError as error:
        return f"{shard.file} cannot be read: {error.strerror}"
    except (InputError, ValueError) as error:
        return f"{shard.file} is no safetensors file: {error}"
    if set(header) - {"__metadata__"} != set(shard.keys):
        return f"{shard.file} does not have the tensors that were written"
    end = begin
    for key in shard.keys:
        place = place_of_key(key, tensors)
        assert place is not None, "checked before"
        name, num_bytes = DTYPES[tensors[place[0]].dtype]
        said = header[key]
        expected = {"dtype": name, "shape": list(place[1].sizes)}
        if not isinstance(said, dict) or {name: said.get(name) for name in expected} != expected:
            return f"{shard.file}: {shown(key)} is {shown(said)}; {expected} was written"
        end += prod(place[1].sizes) * num_bytes
    return (
        None
        if end == shard.num_bytes
        else f"{shard.file} has {shard.num_bytes} bytes; its tensors take {end}"
    )


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's header, and where the tensors' bytes begin.

    Raises:
        OSError, ValueError, InputError: it cannot be read; it is not one.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = parse_json(file.read(length).decode(), where="its header")
    if not isinstance(header, dict):
        raise ValueError("its header is not a mapping")
    return header, _LENGTH_BYTES + length


def _wrong_checksum(folder: Path, shard: Shard | FrozenFile) -> str | None:
    try:
        actual = checksum(folder / shard.file)
    except OSError as error:
        return f"{shard.file} cannot be read: {error.strerror}"
    return None if actual == shard.sha256 else f"{shard.file} is not what was written: its checksum differs"


@dataclass(frozen=True)
class StoredCheckpoint:
    """The newest whole checkpoint of a run. `skipped`: newer ones that are not, each with why, for people."""

    folder: Path
    checkpoint: Checkpoint
    skipped: tuple[str, ...]


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return model_path(run_dir, step).parent


def find_checkpoint(run_dir: Path, *, step: int | None = None, reads_all: bool = False) -> StoredCheckpoint:
    """The newest checkpoint that is whole.

    Args:
        run_dir: the run's folder.
        step: take the one after this step, and no other.
        reads_all: compare every shard's checksum too, not only its size.

    Raises:
        InputError: there is none, or no such folder; says what is wrong with those that are there.
    """
    require_folder(run_dir)
    skipped: dict[str, list[str]] = {}  # what is wrong -> where: with what all of them share, once
    for number, folder in reversed(_folders(run_dir)):
        if step is not None and number != step:
            continue
        try:
            checkpoint = read_index(folder)
        except InputError as error:
            skipped.setdefault(error.message, []).append(folder.name)
            continue
        problem = (
            damage(folder, checkpoint, reads_all=reads_all)
            if checkpoint.step == number
            else f"its index is of step {checkpoint.step}"
        )
        if problem is None:
            return StoredCheckpoint(folder, checkpoint, _said(skipped))
        skipped.setdefault(problem, []).append(folder.name)
    raise InputError(
        "\n  ".join((f"{run_dir}: there is no checkpoint to go on from", *_said(skipped))),
        hint="Start the run anew; with --checkpoint-every it saves one every so many steps.",
    )


def require_folder(run_dir: Path) -> None:
    """Refuse what is no folder, where a run is to be.

    Raises:
        InputError: it is none.
    """
    if not run_dir.is_dir():
        what = "a file, not the folder of a run" if run_dir.exists() else "there is no such folder"
        raise InputError(f"{run_dir}: {what}", hint="Name the folder of a run, such as runs/<workload>-1.")


def _said(skipped: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    return tuple(f"{', '.join(names)} cannot be used: {problem}" for problem, names in skipped.items())


def require_steps_left(stored: StoredCheckpoint, total_steps: int) -> None:
    """Refuse to go on from a checkpoint at or behind the run's end.

    Raises:
        InputError: it is.
    """
    if stored.checkpoint.step >= total_steps:
        raise InputError(
            f"{stored.folder}: the run has done {stored.checkpoint.step} steps already, "
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


def forget_old(
    run_dir: Path, newest_step: int, keep: int, *, saved_steps: Collection[int], began: int
) -> None:
    """Delete what is older than the last `keep` whole checkpoints up to `newest_step`.

    Args:
        newest_step: of the one that was just saved, which always stays.
        own: steps after which this run has saved since it was started: these are whole.
        began: the step that it went on from then. What lies behind it and is not its own is damaged, or of an
            attempt that was given up, and keeps nothing else from staying.

    Raises:
        OSError: one cannot be deleted.
    """
    until = [(step, folder) for step, folder in reversed(_folders(run_dir)) if step <= newest_step]
    kept = 0
    for step, folder in until:
        if kept >= keep:
            shutil.rmtree(folder)
        elif step in saved_steps or step == newest_step or (step <= began and _is_whole(folder)):
            kept += 1


def _is_whole(folder: Path) -> bool:
    """Say whether a checkpoint is whole, by its index and its files' sizes."""
    try:
        return damage(folder, read_index(folder), reads_all=False) is None
    except InputError:
        return False


def _folders(run_dir: Path) -> list[tuple[int, Path]]:
    """Every checkpoint's folder, by step, whole or not."""
    folders = [
        (int(number), folder)
        for folder in (run_dir / CHECKPOINTS_DIR).glob("step-*")
        if (number := folder.name.removeprefix("step-")).isdecimal()
    ]
    return sorted(folders)
