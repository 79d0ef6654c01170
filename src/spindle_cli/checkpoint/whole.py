"""One whole tensor of a checkpoint after the other, in one process."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spindle_cli.checkpoint.damage import place_of_key
from spindle_cli.checkpoint.index import Checkpoint
from spindle_cli.checkpoint.names import every_name
from spindle_cli.checkpoint.regions import Region
from spindle_cli.errors import InputError


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
        """That of a tensor that there is."""
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
        found = self._checkpoint.tensors[self._saved[key]].shape
        if found != shape:
            raise InputError(
                f"{self._folder}: {key} has shape {found}; the workload's has {shape}",
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
                found = self._file(file).get_tensor(part)
            except (OSError, SafetensorError) as error:
                raise InputError(f"{self._folder / file}: cannot be read: {error}") from error
            target = whole
            for dim, (first, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
                target = target.narrow(dim, first, size)
            target.copy_(found)
        return whole

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = self._open.enter_context(safe_open(self._folder / name, framework="pt"))
        return self._files[name]
