"""A safetensors file, or a folder of them, as tensors by name; of each, any part is read by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import read_data, shown
from spindle_cli.files.tensors import DTYPES

SINGLE_FILES = ("model.safetensors", "adapter_model.safetensors")
HF_INDEX_FILE = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
Ranges = Sequence[tuple[int, int]] | None
_TORCH_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for name, (code, _) in DTYPES.items()}


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in a file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def tensors_in(path: Path, place: str) -> dict[str, TensorPlace]:
    """Return every tensor of a safetensors file, or of a folder that has one or shards with their index.

    Args:
        place: where the path was given, for messages.

    Raises:
        InputError: there is none, it is a pickle, cannot be read, or is damaged; the index and the shards
            differ.
    """
    where = f"{place}.path: {path}"
    if path.is_dir():
        return _in_folder(path, where)
    if path.name == HF_INDEX_FILE and path.is_file():
        return _in_shards(path, where)
    _require_no_pickle(path, where)
    if not path.is_file():
        raise InputError(
            f"{where}: no such file or folder",
            hint="A path is relative to the workload file; nothing is downloaded.",
        )
    return _in_file(path, where)


def _in_folder(folder: Path, where: str) -> dict[str, TensorPlace]:
    index = folder / HF_INDEX_FILE
    single = [name for name in SINGLE_FILES if (folder / name).is_file()]
    if index.is_file() and single:
        raise InputError(
            f"{where}: it has {single[0]} and shards with {HF_INDEX_FILE}: two models, or one twice",
            hint=f"Name the file that is meant: {folder / single[0]}, or {index}.",
        )
    if index.is_file():
        return _in_shards(index, where)
    if single:
        return _in_file(folder / single[0], where)
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles:
        _require_no_pickle(folder / pickles[0], where)
    raise InputError(
        f"{where}: there is neither {SINGLE_FILES[0]} nor {HF_INDEX_FILE} in it",
        hint="`--from` begins from a run of Spindle's; at its end it has left a model.safetensors, too."
        if (folder / "checkpoints").is_dir() or (folder / "checkpoint.json").is_file()
        else "Name a safetensors file, or a folder that save_pretrained has written.",
    )


def _require_no_pickle(path: Path, where: str) -> None:
    if path.suffix in _PICKLES:
        raise InputError(
            f"{where}: {path.name} is a pickle, which can run any code when it is read, and is not opened",
            hint="Where you trust it, turn it into safetensors: "
            "AutoModel.from_pretrained(FOLDER).save_pretrained(OTHER_FOLDER), "
            "or safetensors.torch.save_file(torch.load(FILE, weights_only=True), FILE_OF_TENSORS).",
        )


def _in_shards(index: Path, where: str) -> dict[str, TensorPlace]:
    data = read_data(index)
    weights = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise InputError(f"{index}: weight_map: expected a mapping of names to files; found {shown(weights)}")
    names: dict[str, list[str]] = {}
    for name, file in weights.items():
        if not isinstance(name, str) or not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{index}: weight_map.{shown(name)}: {shown(file)} is no file beside the index")
        names.setdefault(file, []).append(name)
    places: dict[str, TensorPlace] = {}
    for file, expected in names.items():
        path = index.parent / file
        _require_no_pickle(path, where)
        if not path.is_file():
            raise InputError(f"{index}: {file} is missing, which has {len(expected)} of the tensors")
        there = _in_file(path, where)
        _require_same_names(index, file, expected, there)
        places.update(there)
    return places


def _require_same_names(index: Path, file: str, expected: Iterable[str], there: Iterable[str]) -> None:
    said, has = set(expected), set(there)
    for names, problem in ((said - has, "is not in"), (has - said, "is not said to be in")):
        if names:
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(
                f"{index}: {shown(min(names))} {problem} {file}{more}",
                hint="The index and its shards are of different models: copy them together again.",
            )


def _in_file(path: Path, where: str) -> dict[str, TensorPlace]:
    with _opened(path) as file:
        places: dict[str, TensorPlace] = {}
        for name in file.keys():  # noqa: SIM118 - no mapping
            part = file.get_slice(name)
            code = part.get_dtype()
            if code not in _TORCH_DTYPES:
                raise InputError(f"{where}: {shown(name)} has numbers of type {code}, which is not known")
            places[name] = TensorPlace(path, name, tuple(part.get_shape()), _TORCH_DTYPES[code])
    if not places:
        raise InputError(f"{where}: there are no tensors in {path.name}")
    return places


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path}: cannot be read: {error}", hint="It may have been cut off: copy it again."
        ) from error


def read_parts(wanted: Mapping[str, tuple[TensorPlace, Ranges]]) -> Iterator[tuple[str, Tensor]]:
    """Read boxes of tensors, one by one, each file opened once; no bytes but theirs are read.

    Args:
        wanted: key -> a tensor, and [first, last) of each of its dimensions; None: all of it.

    Raises:
        InputError: a file cannot be read.
    """
    by_file: dict[Path, list[str]] = {}
    for key, (place, _) in wanted.items():
        by_file.setdefault(place.file, []).append(key)
    for path, keys in by_file.items():
        with _opened(path) as file:
            for key in keys:
                yield key, _box(file, *wanted[key])


def _box(file: Any, place: TensorPlace, ranges: Ranges) -> Tensor:
    values: Tensor
    if ranges is None or not ranges:
        values = file.get_tensor(place.name)
    else:
        values = file.get_slice(place.name)[tuple(slice(first, last) for first, last in ranges)]
    return values
