"""The tensors of a checkpoint, read one at a time from whichever shard has them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spindle_cli.checkpoint_files import Checkpoint, Part, state_key, state_of
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
        # Of each parameter, by the optimizer's key: the parts of it that are there; None is all of it.
        self._states: dict[str, dict[str, list[Part | None]]] = {}
        for shard in sorted(checkpoint.shards, key=lambda shard: shard.file != own):
            for key in shard.keys:
                if key not in self._where and (found := state_of(key)) is not None:
                    optimizer_key, name, part = found
                    self._states.setdefault(name, {}).setdefault(optimizer_key, []).append(part)
                self._where.setdefault(key, shard.file)

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def optimizer_keys(self, name: str) -> tuple[str, ...]:
        """The optimizer's keys for a parameter; none where it has no state of it."""
        return tuple(self._states.get(name, {}))

    def state(self, key: str, name: str, part: Part | None) -> Tensor:
        """Optimizer state of a parameter, or of a part of it, however it was cut when saved.

        Args:
            key, name: the optimizer's key, and the parameter.
            part: of the flattened parameter; None: all of it.

        Returns:
            A vector, unless all of it was saved and is asked for; a state without the parameter's elements (a
            count of steps) as it is.

        Raises:
            InputError: a shard cannot be read, or some of the elements are in none.
        """
        parts = self._states[name][key]
        if None in parts:
            found = self.get(state_key(key, name))
            return found if part is None or found.dim() == 0 else found.flatten()[slice(*part)]
        cut = sorted(each for each in parts if each is not None)
        first, last = (0, cut[-1][1]) if part is None else part
        taken: list[Tensor] = []
        for begin, end in cut:
            if begin <= first < min(end, last):
                found = self.get(state_key(key, name, (begin, end)))
                if found.dim() == 0:
                    return found
                taken.append(found[first - begin : last - begin])
                first = min(end, last)
        if first < last:
            raise InputError(
                f"{self._folder}: the optimizer's {key} of {name} lacks elements {first} to {last - 1}",
                hint="The checkpoint is of another version of the workload.",
            )
        return torch.cat(taken)

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
