"""Read and write the tensors of a run's checkpoints.

They are read through `torch.distributed.checkpoint`, or one whole tensor after the other.

`CheckpointReader` is the storage: with it any plain PyTorch program loads a checkpoint by
`torch.distributed.checkpoint.load(state_dict, storage_reader=CheckpointReader(folder))`. `WholeTensors` puts
tensors together in one process without it. The files are safetensors and JSON; nothing in them is unpickled.

A tensor is known by its name (index.py) and its whole shape; a process has parts of it, each a box.
Safetensors files are written tensor by tensor, so that not all of one has to be in memory at a time. The
format: the header's length in 8 bytes, little-endian; the header, JSON that gives each tensor's dtype, shape
and place; then the bytes of all tensors. (https://huggingface.co/docs/safetensors)
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from spindle_cli.checkpoint.files import damage, place_of_key
from spindle_cli.checkpoint.index import INDEX_FILE, Checkpoint, Region, SavedTensor, every_name, read_index
from spindle_cli.errors import InputError
from spindle_cli.files.tensors import DTYPES

_NAMES = {getattr(torch, name): code for name, (code, _) in DTYPES.items()}
_ALIGNMENT = 8  # of the tensors' bytes in the file


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Gives the shape and dtype of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor's elements."""
        return prod(self.shape) * self.dtype.itemsize


class Digest(Protocol):
    """One of hashlib's."""

    def update(self, content: bytes | memoryview, /) -> None:
        """Take these bytes in."""


def file_order(specs: Mapping[str, TensorSpec]) -> list[str]:
    """The keys in the order in which their tensors lie in a file.

    Larger dtypes first, as the safetensors library does it: then every tensor begins at a multiple of its own
    dtype's size.
    """
    return sorted(specs, key=lambda key: (-specs[key].dtype.itemsize, key))


def write_tensors(
    path: Path,
    specs: Mapping[str, TensorSpec],
    tensor_of: Callable[[str], Tensor],
    digest: Digest | None = None,
) -> int:
    """Write a file, and wait until it is on the disk; returns how many bytes it has.

    Args:
        path: the file.
        specs: what will be in it, by key.
        tensor_of: called once for each key, in `file_order`; the tensor may be on any device. It is let go
            before the next one is asked for.
        digest: takes in the file's bytes.

    Raises:
        OSError: the file cannot be written.
        TypeError: a dtype that safetensors files have no name for.
    """
    with path.open("wb") as file:
        num_bytes = put_tensors(file, specs, tensor_of, digest)
        file.flush()
        os.fsync(file.fileno())
    return num_bytes


def put_tensors(
    file: IO[bytes],
    specs: Mapping[str, TensorSpec],
    tensor_of: Callable[[str], Tensor],
    digest: Digest | None = None,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """What `write_tensors` does with a file that is open. `metadata`: texts in its header."""
    keys, num_bytes = file_order(specs), 0

    def put(content: bytes | memoryview) -> None:
        nonlocal num_bytes
        file.write(content)
        if digest is not None:
            digest.update(content)
        num_bytes += len(content)

    put(_header(keys, specs, metadata))
    for key in keys:
        put(_bytes_of(key, tensor_of(key), specs[key]))
    return num_bytes


def _header(
    keys: list[str], specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> bytes:
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    first = 0
    for key in keys:
        spec = specs[key]
        if spec.dtype not in _NAMES:
            raise TypeError(f"{key}: safetensors files cannot hold {spec.dtype}")
        last = first + spec.num_bytes
        entries[key] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [first, last],
        }
        first = last
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(key: str, tensor: Tensor, spec: TensorSpec) -> memoryview:
    assert TensorSpec.of(tensor) == spec, f"{key}: {TensorSpec.of(tensor)} is not {spec}"
    if spec.num_bytes == 0:
        return memoryview(b"")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content: memoryview = flat.view(torch.uint8).numpy().data
    return content


@dataclass(frozen=True)
class Part:
    """A box of a tensor. `tensor`: its elements, in the region's shape."""

    region: Region
    tensor: Tensor


@dataclass(frozen=True)
class HeldTensor:
    """Parts of a tensor whose whole shape is `shape`."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> HeldTensor:
        """Make the entry of a tensor that is held whole."""
        shape = tuple(tensor.shape)
        return cls(shape, (Part(Region.whole(shape), tensor),))

    @property
    def dtype(self) -> torch.dtype:
        """The type of every part."""
        return self.parts[0].tensor.dtype


class HeldTensors:
    """Tensors by name; parts of the same one are put together."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[Part]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor that is held whole."""
        self.add_part(name, tuple(tensor.shape), Region.whole(tensor.shape), tensor)

    def add_part(
        self,
        name: str,
        shape: tuple[int, ...],
        region: Region,
        tensor: Tensor,
        elements: tuple[int, int] | None = None,
    ) -> None:
        """A part of a tensor.

        Args:
            name, shape: of the whole tensor.
            region: a box of it.
            tensor: the box's elements; in its shape, or with `elements` a vector of those.
            elements: only [first, last) of the box's elements, counted row by row.
        """
        assert self._shapes.setdefault(name, shape) == shape, f"{name} has one shape"
        parts = self._parts.setdefault(name, [])
        if elements is None:
            parts.append(Part(region, tensor.detach()))
        else:
            parts.extend(_boxes(region, tensor.detach(), elements))

    def by_name(self) -> dict[str, HeldTensor]:
        """Return what was added, by name."""
        return {
            name: HeldTensor(self._shapes[name], tuple(parts)) for name, parts in self._parts.items() if parts
        }


def _boxes(region: Region, vector: Tensor, elements: tuple[int, int]) -> Iterator[Part]:
    begin = 0
    for box in region.of_range(*elements):
        size = prod(box.sizes)
        yield Part(box, vector[begin : begin + size].view(box.sizes))
        begin += size


class CheckpointReader(StorageReader):
    """A checkpoint's folder, for `torch.distributed.checkpoint.load`."""

    def __init__(self, folder: str | os.PathLike[str], checkpoint: Checkpoint | None = None) -> None:
        """`checkpoint`: the folder's, where it has been read and its files looked at.

        Raises:
            InputError: the folder has no index, or a file of it is not what was written.
        """
        self._folder = Path(folder)
        self._checkpoint = checkpoint or _read_whole(self._folder)
        self._where: dict[MetadataIndex, tuple[str, str]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Part of torch's interface: from now on another folder, if one is given."""
        if checkpoint_id is not None:
            self._folder, self._where = Path(checkpoint_id), {}
            self._checkpoint = _read_whole(self._folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """What is in the checkpoint, and in which chunks."""
        tensors = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=_dtype(saved)), torch.Size(saved.shape), chunks=[]
            )
            for name, saved in self._checkpoint.tensors.items()
        }
        for shard in self._checkpoint.files:
            for key in shard.keys:
                name, region = self._parse(key)
                chunk = ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))
                tensors[name].chunks.append(chunk)
                self._where[MetadataIndex(name, region.offsets)] = shard.file, key
        for name, saved in every_name(tensors, self._checkpoint.aliases).items():
            if name != saved:
                tensors[name] = tensors[saved]
                self._where.update(
                    (MetadataIndex(name, chunk.offsets), self._where[MetadataIndex(saved, chunk.offsets)])
                    for chunk in tensors[saved].chunks
                )
        return Metadata(dict(tensors))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Part of torch's interface; nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Part of torch's interface; the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Part of torch's interface; the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for, file by file.

        Raises:
            InputError: a shard cannot be read.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._where[item.storage_index][0], []).append(item)
        for file, items in by_file.items():
            path = self._folder / file
            try:
                with safe_open(path, framework="pt") as shard:
                    for item in items:
                        values = _slice(shard, self._where[item.storage_index][1], item)
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(values)
                        planner.commit_tensor(item, target)
            except (OSError, SafetensorError) as error:
                raise InputError(
                    f"{path}: cannot be read: {error}",
                    hint=f"Remove {self._folder}; then --resume takes the checkpoint before it.",
                ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is the folder of a checkpoint of ours."""
        return (Path(checkpoint_id) / INDEX_FILE).is_file()

    def _parse(self, key: str) -> tuple[str, Region]:
        """The tensor that a shard's key stands for, and the part of it."""
        place = place_of_key(key, self._checkpoint.tensors)
        assert place is not None, "looked at when the checkpoint was found"
        return place


def _read_whole(folder: Path) -> Checkpoint:
    checkpoint = read_index(folder)
    problem = damage(folder, checkpoint, reads_all=True)
    if problem is not None:
        raise InputError(f"{folder}: {problem}")
    return checkpoint


def _dtype(saved: SavedTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, saved.dtype)
    return dtype


def _slice(shard: Any, key: str, item: ReadItem) -> Tensor:
    values: Tensor
    if not item.lengths:
        values = shard.get_tensor(key)
    else:
        begins = zip(item.storage_offsets, item.lengths, strict=True)
        values = shard.get_slice(key)[tuple(slice(begin, begin + length) for begin, length in begins)]
    return values


class PartsPlanner(LoadPlanner):
    """Asks for any parts of a checkpoint's tensors, whichever parts were saved."""

    def __init__(self, wanted: Mapping[str, HeldTensor], where: Path) -> None:
        """`where`: the checkpoint, for messages."""
        self._wanted = wanted
        self._place = where
        self._tensors: dict[str, Any] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],  # noqa: ARG002
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: ARG002
    ) -> None:
        """Take note of which tensors the checkpoint has."""
        assert metadata is not None, "a reader has read it"
        self._tensors = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """Everything that is wanted, from whichever chunks have it.

        Raises:
            InputError: something is not in the checkpoint, in part or at all, or has another shape there.
        """
        return LoadPlan([item for name, held in self._wanted.items() for item in self._reads(name, held)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Part of torch's interface; ranks read independently."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Part of torch's interface; the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:  # noqa: ARG002
        """Never called: no checkpoint of ours has anything but tensors in its shards."""
        raise AssertionError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the memory into which an item is read."""
        index = read_item.dest_index.index
        assert index is not None, "set by create_read_items_for_chunk_list"
        target = self._wanted[read_item.dest_index.fqn].parts[index].tensor
        for dim, (first, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, first, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Part of torch's interface; it was read into its place."""

    def _reads(self, name: str, held: HeldTensor) -> list[ReadItem]:
        saved = self._tensors.get(name)
        if saved is None:
            raise InputError(
                f"{self._place}: there is no {name} in it",
                hint="The checkpoint is of another workload, or of one whose modules had other names.",
            )
        if tuple(saved.size) != held.shape:
            raise InputError(
                f"{self._place}: {name} has shape {tuple(saved.size)}; the workload's has {held.shape}",
                hint="The checkpoint is of another version of the workload.",
            )
        chunks = [
            ChunkStorageMetadata(torch.Size(part.region.offsets), torch.Size(part.region.sizes))
            for part in held.parts
        ]
        items = create_read_items_for_chunk_list(name, saved, chunks)
        lacking = sum(prod(chunk.sizes) for chunk in chunks) - sum(prod(item.lengths) for item in items)
        if lacking:
            raise InputError(
                f"{self._place}: {name} lacks {lacking} elements",
                hint="The checkpoint is of another version of the workload.",
            )
        return items


def load_parts(reader: CheckpointReader, wanted: Mapping[str, HeldTensor], where: Path) -> None:
    """Read parts of a checkpoint's tensors into the memory given for them; collective where there are ranks.

    Raises:
        InputError: on every rank, where one of them lacks something or cannot read it.
    """
    with plain_errors(), warnings.catch_warnings():
        # `export` has no ranks, and torch says so.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load({}, storage_reader=reader, planner=PartsPlanner(wanted, where))


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise what went wrong on the first rank where something did, in place of torch's summary of all."""
    try:
        yield
    except CheckpointException as summary:
        failures = summary.failures
        first, _ = failures[min(failures)]
        raise first from None


class WholeTensors:
    """Reads a checkpoint's tensors by any of their names; used as a context, in which its files stay open."""

    def __init__(self, folder: Path, checkpoint: Checkpoint) -> None:
        """The checkpoint is known to be whole."""
        self._folder = folder
        self._checkpoint = checkpoint
        self._saved = every_name(checkpoint.tensors, checkpoint.aliases)
        self._parts: dict[str, list[tuple[str, str, Region]]] = {}
        for file in checkpoint.files:
            for key in file.keys:
                place = place_of_key(key, checkpoint.tensors)
                assert place is not None, "looked at when the checkpoint was found"
                self._parts.setdefault(place[0], []).append((file.file, key, place[1]))
        self._open = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._open.close()

    def has(self, key: str) -> bool:
        """Whether there is a tensor of this name."""
        return key in self._saved

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor that the checkpoint has."""
        return tuple(self._checkpoint.tensors[self._saved[key]].shape)

    def require(self, key: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that is not there, or has another shape.

        Raises:
            InputError: it is so.
        """
        if key not in self._saved:
            raise InputError(
                f"{self._folder}: there is no {key} in it",
                hint="The checkpoint is of another workload, or of one whose modules had other names.",
            )
        saved_shape = self._checkpoint.tensors[self._saved[key]].shape
        if saved_shape != shape:
            raise InputError(
                f"{self._folder}: {key} has shape {saved_shape}; the workload's has {shape}",
                hint="The checkpoint is of another version of the workload.",
            )

    def read(self, key: str) -> Tensor:
        """A tensor, in memory of its own.

        Raises:
            InputError: a file cannot be read.
        """
        name = self._saved[key]
        saved = self._checkpoint.tensors[name]
        whole = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
        for file, part, region in self._parts.get(name, ()) if prod(saved.shape) else ():
            try:
                values = self._file(file).get_tensor(part)
            except (OSError, SafetensorError) as error:
                raise InputError(f"{self._folder / file}: cannot be read: {error}") from error
            target = whole
            for dim, (first, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
                target = target.narrow(dim, first, size)
            target.copy_(values)
        return whole

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = self._open.enter_context(safe_open(self._folder / name, framework="pt"))
        return self._files[name]
