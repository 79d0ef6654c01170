"""The tensors of a checkpoint, read one at a time from whichever shard has them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spindle_cli.checkpoint_files import Checkpoint
from spindle_cli.errors import InputError


class SavedTensors:
    """All shards of a checkpoint by key; a tensor is read when it is asked for."""

    def __init__(
        self, folder: Path, checkpoint: Checkpoint, stack: ExitStack, own: str | None = None
    ) -> None:
        """`own`: the shard that is asked first for what every rank has its own of."""
        self._folder = folder
        self._stack = stack
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for shard in sorted(checkpoint.shards, key=lambda shard: shard.file != own):
            for key in shard.keys:
                self._where.setdefault(key, shard.file)

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def optimizer_keys(self) -> dict[str, list[str]]:
        """The optimizer's keys of every parameter that it has a state of."""
        found: dict[str, list[str]] = {}
        for key in self._where:
            if key.startswith("state:"):
                _, state_key, name = key.split(":", 2)
                found.setdefault(name, []).append(state_key)
        return found

    def get(self, key: str) -> Tensor:
        """Raises InputError: it is not there, or its shard cannot be read."""
        if key not in self._where:
            raise InputError(
                f"{self._folder}: there is no {key.replace(':', ' ', 1)} in it",
                hint="The checkpoint is of another workload, or of one whose modules had other names.",
            )
        path = self._folder / self._where[key]
        try:
            if path.name not in self._files:
                self._files[path.name] = self._stack.enter_context(safe_open(path, framework="pt"))
            found: Tensor = self._files[path.name].get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{path}: cannot be read: {error}",
                hint=f"Remove {self._folder}; then --resume takes the checkpoint before it.",
            ) from error
        return found

    def copy_into(self, tensor: Tensor, key: str) -> None:
        """Raises InputError: it is not there, cannot be read, or has another shape."""
        found = self.get(key)
        if found.shape != tensor.shape:
            raise InputError(
                f"{self._folder}: {key.replace(':', ' ', 1)} has shape {tuple(found.shape)}; "
                f"the workload's has {tuple(tensor.shape)}",
                hint="The checkpoint is of another version of the workload.",
            )
        with torch.no_grad():
            tensor.copy_(found)
