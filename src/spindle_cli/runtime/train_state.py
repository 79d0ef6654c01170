"""What a rank's training consists of, apart from the step: what a checkpoint saves, and puts back.

Which samples a step takes follows from the step alone (workload/batches.py), so there is nothing of them to
save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spindle_cli.checkpoint_files import Checkpoint, shard_name
from spindle_cli.errors import InputError
from spindle_cli.runtime.localise import LocalModel


@dataclass(frozen=True)
class TrainState:
    """A rank's part of the model, and what changes it."""

    model: LocalModel
    optimizer: torch.optim.Optimizer | None
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    device: torch.device


@dataclass(frozen=True)
class Numbers:
    """See `Checkpoint`: the same on every rank that trains anything."""

    hyperparameters: dict[str, Any]
    schedule: dict[str, Any]


def tensors_of(state: TrainState, names: Sequence[str]) -> dict[str, Tensor]:
    """What a rank saves: these parameters with their optimizer state; its buffers and random state."""
    found: dict[str, Tensor] = {}
    for name in names:
        parameter = state.model.parameters[name]
        found[f"parameter:{name}"] = parameter
        held = {} if state.optimizer is None else state.optimizer.state.get(parameter, {})
        for key, value in held.items():
            if value is not None:  # SGD without momentum
                found[f"state:{key}:{name}"] = torch.as_tensor(value)
    found.update({f"buffer:{name}": buffer.clone() for name, buffer in state.model.buffers.items()})
    found["random:cpu"] = torch.get_rng_state()
    if state.device.type == "cuda":
        found["random:cuda"] = torch.cuda.get_rng_state(state.device)
    return {key: _alone(tensor) for key, tensor in found.items()}


def _alone(tensor: Tensor) -> Tensor:
    """In host memory of its own: safetensors takes no parts of larger tensors."""
    there = tensor.detach().cpu().contiguous()
    return there if there.untyped_storage().nbytes() == there.nbytes else there.clone()


def numbers_of(state: TrainState) -> Numbers | None:
    """The optimizer's and the schedule's numbers; None where this rank trains nothing."""
    if state.optimizer is None:
        return None
    schedule = {} if state.schedule is None else state.schedule.state_dict()
    return Numbers(_only_numbers(state.optimizer.param_groups[0]), _only_numbers(schedule))


def _only_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and lists of them: what steps change. All else follows from the train settings."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    return {
        key: value
        for key, value in values.items()
        if is_number(value) or (isinstance(value, list | tuple) and all(map(is_number, value)))
    }


def require_same_settings(checkpoint: Checkpoint, state: TrainState, dtype: str | None, where: Path) -> None:
    """Refuse to go on with other train settings than those that the run began with, but for its length.

    Raises:
        InputError: naming the first that differs.
    """
    before = {**checkpoint.train.model_dump(), "dtype": checkpoint.dtype}
    now = {**state.model.train.model_dump(), "dtype": dtype}
    for key in now:
        if key != "steps" and now[key] != before.get(key):
            raise InputError(
                f"{where}: the run was trained with train.{key} = {before.get(key)!r}, "
                f"but the workload now says {now[key]!r}",
                hint="Put the setting back to go on with this run, or start a new one.",
            )


def restore(folder: Path, checkpoint: Checkpoint, state: TrainState, rank: int) -> None:
    """Put a checkpoint into this rank's part of the model, whatever plan and number of ranks wrote it.

    By the same plan training goes on bit for bit: each rank gets back its own buffers and random state. By
    another, buffers are those of the first rank that has them, and random numbers are drawn anew.

    Raises:
        InputError: a shard cannot be read, or lacks a parameter of this workload.
    """
    same_plan = checkpoint.plan_sha256 == state.model.program.plan.sha256()
    if not same_plan:
        torch.manual_seed(state.model.train.seed + rank + (checkpoint.step << 20))
    with ExitStack() as stack:
        saved = _Saved(folder, checkpoint, stack, own=shard_name(rank) if same_plan else None)
        for name, parameter in state.model.parameters.items():
            saved.copy_into(parameter, f"parameter:{name}")
        for name, buffer in state.model.buffers.items():
            saved.copy_into(buffer, f"buffer:{name}")
        if state.optimizer is not None:
            _restore_optimizer(state, state.optimizer, saved)
        if same_plan:
            torch.set_rng_state(saved.get("random:cpu"))
            if state.device.type == "cuda" and "random:cuda" in saved:
                torch.cuda.set_rng_state(saved.get("random:cuda"), state.device)
    if state.schedule is not None:
        state.schedule.load_state_dict({**state.schedule.state_dict(), **checkpoint.schedule})
    if state.optimizer is not None:
        state.optimizer.param_groups[0].update(checkpoint.hyperparameters)


def _restore_optimizer(state: TrainState, optimizer: torch.optim.Optimizer, saved: _Saved) -> None:
    by_name = saved.optimizer_keys()
    content = optimizer.state_dict()
    content["state"] = {
        index: {key: saved.get(f"state:{key}:{name}") for key in by_name.get(name, ())}
        for index, name in enumerate(state.model.trained)
        if name in by_name
    }
    optimizer.load_state_dict(content)
    # It puts each tensor on the right device, but into the parameter's dtype, which is not that of every one.
    for index, parameter in enumerate(state.model.trained.values()):
        for key, value in content["state"].get(index, {}).items():
            optimizer.state[parameter][key] = optimizer.state[parameter][key].to(value.dtype)


class _Saved:
    """All shards of a checkpoint by key; a tensor is read when it is asked for."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, stack: ExitStack, own: str | None) -> None:
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
