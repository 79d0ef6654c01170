"""Checkpoints made by hand, without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from spindle_cli.checkpoint.files import checkpoint_folder
from spindle_cli.checkpoint.index import (
    INDEX_FILE,
    SUMS_FILE,
    Checkpoint,
    SavedTensor,
    Shard,
    checksum,
    shard_name,
    sums_text,
)
from spindle_cli.files.artifact import to_compact_json
from spindle_cli.workload.file import TrainSettings

Header = Mapping[str, tuple[str, list[int]]]  # key -> the file's name of its dtype, and its shape

# A matrix [2, 3] of which each of two workers has a part, and what they have besides.
TENSORS = {
    "model.a.w": SavedTensor(shape=(2, 3), dtype="float32"),
    "optimizer.state.a.w.step": SavedTensor(shape=(), dtype="float32"),
    "random.cpu.0": SavedTensor(shape=(4,), dtype="uint8"),
}
SHARDS: tuple[Header, ...] = (
    {"model.a.w[0:2,0:2]": ("F32", [2, 2]), "random.cpu.0": ("U8", [4])},
    {"model.a.w[0:2,2:3]": ("F32", [2, 1]), "optimizer.state.a.w.step": ("F32", [])},
)
_BYTES = {"F32": 4, "U8": 1}


def write_checkpoint(run_dir: Path, step: int, shards: tuple[Header, ...] = SHARDS) -> Path:
    """A whole checkpoint of these shards, after so many steps; its folder."""
    folder = checkpoint_folder(run_dir, step)
    folder.mkdir(parents=True)
    for rank, header in enumerate(shards):
        write_shard(folder / shard_name(rank), header)
    described = tuple(describe(folder / shard_name(rank), tuple(each)) for rank, each in enumerate(shards))
    write_index(
        folder,
        Checkpoint(
            step=step,
            plan_sha256="sha256:0",
            workload="mine.yaml",
            fingerprint="sha256:1",
            train=TrainSettings(lr=0.001),
            tensors=TENSORS,
            shards=described,
            hyperparameters={"lr": 0.0009, "betas": [0.9, 0.999]},
            schedule={"last_epoch": step},
        ),
    )
    return folder


def write_shard(path: Path, header: Header) -> None:
    """A safetensors file of these tensors, with bytes that count up."""
    entries, end = {}, 0
    for key, (dtype, shape) in header.items():
        begin, size = end, _BYTES[dtype]
        for length in shape:
            size *= length
        end += size
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(end)))


def describe(path: Path, keys: tuple[str, ...]) -> Shard:
    """What the index says of a shard."""
    return Shard(file=path.name, num_bytes=path.stat().st_size, keys=keys, sha256=checksum(path))


def write_index(folder: Path, checkpoint: Checkpoint) -> None:
    """An index and its checksums, whatever it says."""
    text = to_compact_json(checkpoint)
    (folder / INDEX_FILE).write_text(text)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    (folder / SUMS_FILE).write_text(sums_text(sha256, checkpoint.shards))
