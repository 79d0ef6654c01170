"""A folder of shards with their index, as Hugging Face's `save_pretrained` lays it out, written whole or not
at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path

from spindle_cli.checkpoint.tensors import TensorSpec, put_tensors
from spindle_cli.errors import InputError, UsageError
from spindle_cli.export.selection import Selection
from spindle_cli.files.writing import write_text, written_whole

FORMAT = {"format": "pt"}  # without it, transformers takes the file for another library's


def write_folder(output: Path, selection: Selection, shard_bytes: int) -> dict[str, int]:
    """Write tensors in files of at most `shard_bytes` of tensors each, in their order; a larger tensor has a
    file of its own. One of them is in memory at a time.

    Returns:
        The files of tensors, in their order, and the bytes of each.

    Raises:
        UsageError: there is something in the folder already.
        InputError: it cannot be written; then it is as it was.
    """
    shards = split(selection.specs, shard_bytes)
    names = shard_names(selection.name, len(shards))
    sizes: dict[str, int] = {}
    with _folder(output) as folder:
        for write in selection.companions:
            write(folder)
        for name, keys in zip(names, shards, strict=True):
            specs = {key: selection.specs[key] for key in keys}
            with written_whole(folder / name) as file:
                sizes[name] = put_tensors(file, specs, selection.read, metadata=FORMAT)
        if len(shards) > 1:
            write_text(folder / f"{selection.name}.safetensors.index.json", _index(selection, names, shards))
    return sizes


def split(specs: Mapping[str, TensorSpec], shard_bytes: int) -> list[list[str]]:
    """The keys of every file, in their order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for key, spec in specs.items():
        if shards[-1] and filled + spec.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += spec.num_bytes
    return shards


def shard_names(name: str, count: int) -> list[str]:
    """'model-00001-of-00003.safetensors' and so on; of one file 'model.safetensors'."""
    if count == 1:
        return [f"{name}.safetensors"]
    return [f"{name}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _index(selection: Selection, names: list[str], shards: list[list[str]]) -> str:
    specs = selection.specs.values()
    content = {
        "metadata": {
            "total_parameters": sum(prod(spec.shape) for spec in specs),
            "total_size": sum(spec.num_bytes for spec in specs),
        },
        "weight_map": {key: name for name, keys in zip(names, shards, strict=True) for key in keys},
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


@contextmanager
def _folder(output: Path) -> Iterator[Path]:
    """A folder that gets its name when the block ends well; else nothing is left of it."""
    target = Path(os.path.realpath(output))
    aside = target.with_name(f".{target.name}.export.tmp")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(
            f"-o {output}: there is something already; with these options a folder is written",
            hint="Give a folder that is not there, or is empty.",
        )
    try:
        if aside.exists():  # of an export that was killed
            shutil.rmtree(aside)
        aside.mkdir(parents=True)
        try:
            yield aside
            if target.exists():
                target.rmdir()
            aside.rename(target)
        finally:
            if aside.exists():
                shutil.rmtree(aside)
    except OSError as error:
        raise InputError(
            f"{output}: cannot be written: {error.strerror or error}",
            hint="Check that the folder above it is writable, and that the disk is not full.",
        ) from error
