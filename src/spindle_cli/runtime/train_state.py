"""What a rank's training consists of, apart from the step: what a checkpoint saves, and puts back.

Which samples a step takes follows from the step alone (workload/batches.py), so there is nothing of them to
save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spindle_cli.carry_over import CarryOver
from spindle_cli.checkpoint_files import Checkpoint, require_same_workload, shard_name, state_key
from spindle_cli.errors import InputError
from spindle_cli.runtime.localise import LocalModel
from spindle_cli.runtime.masters import MASTER_KEY, Masters
from spindle_cli.runtime.pieces import Piece
from spindle_cli.saved_tensors import SavedTensors
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.optimizer import state_keys
from spindle_cli.workload.schedule import advance


@dataclass(frozen=True)
class TrainState:
    """A rank's part of the model, and what changes it. `pieces`: what `optimizer` steps, in its order;
    with `masters` it is those.
    """

    model: LocalModel
    pieces: tuple[Piece, ...]
    masters: Masters | None
    optimizer: torch.optim.Optimizer | None
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    device: torch.device


@dataclass(frozen=True)
class Numbers:
    """See `Checkpoint`: the same on every rank that trains anything."""

    hyperparameters: dict[str, Any]
    schedule: dict[str, Any]


def tensors_of(state: TrainState, names: Sequence[str]) -> dict[str, Tensor]:
    """What a rank saves: these parameters, its pieces' optimizer state, its buffers and random state."""
    found: dict[str, Tensor] = {f"parameter:{name}": state.model.parameters[name] for name in names}
    for piece in state.pieces:
        if state.optimizer is None or not piece.counted:
            continue
        if state.masters is not None:
            found[state_key(MASTER_KEY, piece.name, piece.part)] = piece.tensor
        for key, value in state.optimizer.state.get(piece.tensor, {}).items():
            if value is not None:  # SGD without momentum
                found[state_key(key, piece.name, piece.part)] = torch.as_tensor(value)
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


def require_same_run(checkpoint: Checkpoint, state: TrainState, dtype: str | None, where: Path) -> None:
    """Refuse to go on with other tasks or train settings than those that the run began with, but for its
    length and where the optimizer's state is.

    Raises:
        InputError: naming the first that differs.
    """
    require_same_workload(checkpoint, state.model.graph.fingerprint, where)
    before = {**checkpoint.train.model_dump(), "dtype": checkpoint.dtype}
    now = {**state.model.train.model_dump(), "dtype": dtype}
    for key in now:
        if key not in ("steps", "shard_optimizer") and now[key] != before.get(key):
            raise InputError(
                f"{where}: the run was trained with train.{key} = {before.get(key)!r}, "
                f"but the workload now says {now[key]!r}",
                hint="Put the setting back to go on with this run, or begin a new one from it with --from.",
            )


def restore(
    folder: Path, checkpoint: Checkpoint, state: TrainState, rank: int, carried: CarryOver | None = None
) -> None:
    """Put a checkpoint into this rank's part of the model, whatever plan and number of ranks wrote it.

    By the same plan training goes on bit for bit: each rank gets back its own buffers and random state. By
    another, buffers are those of the first rank that has them, and random numbers are drawn anew.

    Args:
        carried: parameters and buffers as they were saved, where the checkpoint is of another workload; what
            is new keeps its initial values and has no optimizer state.

    Raises:
        InputError: a shard cannot be read, or lacks a parameter of this workload.
    """

    def saved_key(name: str) -> str | None:
        return name if carried is None else carried.saved_key(name)

    same_plan = checkpoint.plan_sha256 == state.model.program.plan.sha256()
    if not same_plan:
        torch.manual_seed(state.model.train.seed + rank + (checkpoint.step << 20))
    with ExitStack() as stack:
        saved = SavedTensors(folder, checkpoint, stack, own=shard_name(rank) if same_plan else None)
        for name, parameter in state.model.parameters.items():
            if (key := saved_key(name)) is not None:
                _restore_parameter(parameter, key, saved, from_master=state.masters is None)
        for name, buffer in state.model.buffers.items():
            if (key := saved_key(name)) is not None:
                saved.copy_into(buffer, f"buffer:{key}")
        if state.masters is not None:
            state.masters.take_parameters()
        if state.optimizer is not None:
            _restore_optimizer(state, state.optimizer, saved, saved_key)
        if same_plan:
            torch.set_rng_state(saved.get("random:cpu"))
            if state.device.type == "cuda" and "random:cuda" in saved:
                torch.cuda.set_rng_state(saved.get("random:cuda"), state.device)
    if same_rate(checkpoint.train, state.model.train):
        if state.schedule is not None:
            state.schedule.load_state_dict({**state.schedule.state_dict(), **checkpoint.schedule})
        if state.optimizer is not None:
            state.optimizer.param_groups[0].update(checkpoint.hyperparameters)
    elif state.schedule is not None:
        advance(state.schedule, checkpoint.step)


def same_rate(before: TrainSettings, now: TrainSettings) -> bool:
    """Whether the optimizer's numbers go on as they are: it and its schedule are set as before."""
    return (before.lr, before.optimizer_args, before.schedule) == (now.lr, now.optimizer_args, now.schedule)


def _restore_parameter(tensor: Tensor, key: str, saved: SavedTensors, *, from_master: bool) -> None:
    """`from_master`: from its float32 master, if it has one, and not from what was rounded."""
    saved.copy_into(tensor, f"parameter:{key}")
    if from_master and MASTER_KEY in saved.optimizer_keys(key):
        with torch.no_grad():
            tensor.copy_(saved.state(MASTER_KEY, key, None).view(tensor.shape))


def _restore_optimizer(
    state: TrainState,
    optimizer: torch.optim.Optimizer,
    saved: SavedTensors,
    saved_key: Callable[[str], str | None],
) -> None:
    content = optimizer.state_dict()
    wanted = {MASTER_KEY, *state_keys(state.model.train)}
    found: list[dict[str, Tensor]] = []
    for piece in state.pieces:
        key = saved_key(piece.name)
        values = {} if key is None else _saved_state(replace(piece, name=key), saved)
        found.append({name: value for name, value in values.items() if name in wanted})
    for piece, values in zip(state.pieces, found, strict=True):
        if (master := values.pop(MASTER_KEY, None)) is not None and state.masters is not None:
            piece.tensor.detach().copy_(master)
    content["state"] = {index: values for index, values in enumerate(found) if values}
    optimizer.load_state_dict(content)
    # It puts each tensor on the right device, but into the parameter's dtype, which is not that of every one.
    for index, piece in enumerate(state.pieces):
        for key, value in content["state"].get(index, {}).items():
            optimizer.state[piece.tensor][key] = optimizer.state[piece.tensor][key].to(value.dtype)


def _saved_state(piece: Piece, saved: SavedTensors) -> dict[str, Tensor]:
    """A piece's optimizer state by key, whole or in pieces as it may have been saved."""
    keys = saved.optimizer_keys(piece.name)
    found = {key: saved.state(key, piece.name, piece.part) for key in keys}
    if piece.part is not None:
        return found
    shape = piece.tensor.shape
    return {
        key: value.view(shape) if value.dim() == 1 and value.numel() == shape.numel() else value
        for key, value in found.items()
    }
