"""Whether a checkpoint's files are what was written, known before anything of them is in memory. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from spindle_cli.checkpoint.index import Checkpoint, FrozenFile, SavedTensor, Shard, checksum
from spindle_cli.checkpoint.names import Region, parse_region
from spindle_cli.errors import InputError
from spindle_cli.files.parsing import parse_json, shown
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
            found = readers.map(partial(_wrong_checksum, folder), checkpoint.files)
            yield from (problem for problem in found if problem is not None)


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
        found = checksum(folder / shard.file)
    except OSError as error:
        return f"{shard.file} cannot be read: {error.strerror}"
    return None if found == shard.sha256 else f"{shard.file} is not what was written: its checksum differs"
