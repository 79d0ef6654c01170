"""What a process holds, or wants, of the tensors of a checkpoint.

A tensor is known by its name (names.py) and its whole shape; a process has parts of it, each a box.

Write safetensors files tensor by tensor, so that not all of one has to be in memory at a time.

The format: the header's length in 8 bytes, little-endian; the header, JSON that gives each tensor's dtype,
shape and place; then the bytes of all tensors. (https://huggingface.co/docs/safetensors)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Protocol

import torch
from torch import Tensor

from spindle_cli.checkpoint.names import Region
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
