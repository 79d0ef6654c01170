"""A batch in memory that processes share: one file without a name, and where in it each field is."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 64  # bytes: where fields begin, so that kernels read them at full speed


@dataclass(frozen=True)
class PackedField:
    """A field of a batch: `offset` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """The bytes of the field's elements."""
        return torch.Size(self.shape).numel() * _dtype(self.dtype).itemsize


class PackedBatch:
    """A batch whose memory is gone when the last process that has it lets it go, however that one ends.

    It is handed to another process by its file's descriptor: the tensors themselves are never sent.
    """

    def __init__(self, descriptor: int, fields: tuple[PackedField, ...]) -> None:
        """`descriptor`: closed by `close`."""
        self.descriptor = descriptor
        self.fields = fields

    @classmethod
    def of(cls, batch: Mapping[str, Tensor]) -> PackedBatch:
        """A copy of a batch.

        Raises:
            OSError: there is no memory for it.
        """
        fields: list[PackedField] = []
        end = 0
        for name, tensor in batch.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            fields.append(PackedField(name, dtype, tuple(tensor.shape), end))
            end += -(-fields[-1].num_bytes // _ALIGNED) * _ALIGNED
        packed = cls(_nameless_file(max(end, 1)), tuple(fields))
        memory = packed._memory()
        for field in fields:
            _view(memory, field).copy_(batch[field.name])
        return packed

    def rows(self, first: int, last: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Copies of the samples [first, last) of the named fields, or of all."""
        memory = self._memory()
        return {
            field.name: _view(memory, field)[first:last].clone()
            for field in self.fields
            if names is None or field.name in names
        }

    def to_json(self) -> list[dict[str, Any]]:
        """Return the fields as JSON, for `from_json`."""
        return [asdict(field) for field in self.fields]

    @classmethod
    def from_json(cls, descriptor: int, fields: list[dict[str, Any]]) -> PackedBatch:
        """Return the batch that another process has sent: its file's descriptor and its fields."""
        return cls(
            descriptor, tuple(PackedField(**{**field, "shape": tuple(field["shape"])}) for field in fields)
        )

    def close(self) -> None:
        """Close the batch's file."""
        os.close(self.descriptor)

    def __reduce__(self) -> tuple[Callable[[Any, tuple[PackedField, ...]], PackedBatch], tuple[Any, ...]]:
        handle = DupFd(self.descriptor)
        self.close()  # the handle has a copy
        return _received, (handle, self.fields)

    def _memory(self) -> Tensor:
        return torch.frombuffer(mmap.mmap(self.descriptor, 0), dtype=torch.uint8)


def _received(handle: Any, fields: tuple[PackedField, ...]) -> PackedBatch:
    return PackedBatch(handle.detach(), fields)


def _nameless_file(num_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("spindle-batch")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, num_bytes)  # fails here, instead of killing who writes to it
        else:
            os.ftruncate(descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _view(memory: Tensor, field: PackedField) -> Tensor:
    part = memory[field.offset : field.offset + field.num_bytes]
    return part.view(_dtype(field.dtype)).view(field.shape)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
