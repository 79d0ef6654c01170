"""Where a rank's training begins: anew, or with a checkpoint of its own run or another's put into its part of
the model, whatever plan and number of ranks wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spindle_cli.checkpoint.carry_over import (
    CarryOver,
    carried_over,
    require_same_optimizer,
    require_same_run,
)
from spindle_cli.checkpoint.files import find_checkpoint, require_steps_left
from spindle_cli.checkpoint.index import (
    AVERAGE_KEY,
    COMMON_KEY,
    OUTER_MOMENTUM_KEY,
    Checkpoint,
    SavedTensor,
    buffer_key,
    every_name,
    model_key,
    optimizer_keys,
    random_key,
    state_key,
)
from spindle_cli.checkpoint.tensors import HeldTensors
from spindle_cli.errors import InputError
from spindle_cli.files.request import RunRequest
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.runtime.islands.outer import OuterOptimizer
from spindle_cli.runtime.part.replicas import check_replicas
from spindle_cli.runtime.saving.train_state import TrainState, place_of
from spindle_cli.runtime.update.masters import MASTER_KEY
from spindle_cli.runtime.update.optimizers import GroupOptimizer
from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.training.optimizing.optimizer import number_keys, state_keys
from spindle_cli.training.optimizing.schedules import advance, resume_schedule
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.settings.updates import OptimizerChoice


def restore(
    folder: Path, checkpoint: Checkpoint, state: TrainState, rank: int, carried: CarryOver | None = None
) -> None:
    """Put a checkpoint in place; collective.

    By the same plan training goes on bit for bit: each rank gets back its own buffers and random state. By
    another, buffers are those of the first rank that has them, and random numbers are drawn anew.

    Args:
        carried: parameters and buffers as they were saved, where the checkpoint is of another workload; what
            is new keeps its initial values and has no optimizer state.

    Raises:
        InputError: a shard cannot be read, or lacks a parameter of this workload.
    """
    # Its import takes most of a second, which a run that goes on from nothing need not wait for.
    from spindle_cli.checkpoint.tensors import CheckpointReader, load_parts

    same_plan = checkpoint.plan_sha256 == state.model.program.plan.sha256()
    if not same_plan:
        torch.manual_seed(state.model.train.seed + rank + (checkpoint.step << 20))
    wish = _Wish(checkpoint, state, rank, carried, folder, same_plan=same_plan)
    load_parts(CheckpointReader(folder, checkpoint), wish.wanted.by_name(), folder)
    if state.masters is not None:
        state.masters.take_parameters()
    both = list(zip(state.optimizers.groups, wish.states, strict=True))
    if state.optimizers.average is not None:
        state.optimizers.average.resume(checkpoint.step, _averages(both))
    _resume_outer(state.outer, both)
    for group, states in both:
        _hand_over(group, states)
    for key, generator in wish.generators.items():
        if key == random_key("cpu", rank):
            torch.set_rng_state(generator)
        else:
            torch.cuda.set_rng_state(generator, state.device)
    for group in state.optimizers.groups:
        _restore_numbers(group, checkpoint, state.model.train)
    is_scaled_as_before = checkpoint.train.scaling == state.model.train.scaling
    if state.loss_scale is not None and checkpoint.loss_scale is not None and is_scaled_as_before:
        state.loss_scale.resume(checkpoint.loss_scale)


def _restore_numbers(group: GroupOptimizer, checkpoint: Checkpoint, now: TrainSettings) -> None:
    """Where a group's settings and the schedule are as before, its numbers go on as they were; else it begins
    with what they are now, at the checkpoint's step.
    """
    name = group.choice.name
    saved = checkpoint if name is None else checkpoint.groups.get(name)
    if saved is not None and same_rate(checkpoint.train, now, name):
        if group.schedule is not None:
            resume_schedule(group.schedule, saved.schedule, checkpoint.step)
        group.numbers.update(saved.hyperparameters)
    elif group.schedule is not None:
        advance(group.schedule, checkpoint.step)


def same_rate(before: TrainSettings, now: TrainSettings, group: str | None) -> bool:
    """Whether an optimizer group's numbers go on as they are: it and its schedule are set as before."""
    earlier, later = ({choice.name: choice for choice in train.choices} for train in (before, now))
    if group not in earlier or repr(earlier[group]) != repr(later[group]):
        return False
    return (before.schedule_of(group), before.ramp) == (now.schedule_of(group), now.ramp)


class _Wish:
    """What a rank wants of a checkpoint, and the memory to read it into.

    Attributes:
        wanted: all of it.
        states: by optimizer group, of each owned range its optimizer state by the optimizer's keys.
        generators: this rank's random states by their names; none by another plan.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        state: TrainState,
        rank: int,
        carried: CarryOver | None,
        folder: Path,
        *,
        same_plan: bool,
    ) -> None:
        self._state = state
        self._carried = carried
        self._folder = folder
        saved = every_name(checkpoint.tensors, checkpoint.aliases)
        self._tensors: dict[str, SavedTensor] = {
            name: checkpoint.tensors[saved_name] for name, saved_name in saved.items()
        }
        self._keys: Mapping[str, Sequence[str]] = optimizer_keys(saved)
        self.wanted = HeldTensors()
        for key in state.model.parameters:
            self._want_parameter(key)
        for name, buffer in state.model.buffers.items():
            rank_key, saved_name = buffer_key(name, rank), self._saved_name(name)
            if same_plan and rank_key in self._tensors:
                self._want_buffer(rank_key, name, buffer)
            elif saved_name is not None:
                self._want_buffer(model_key(saved_name), name, buffer)
        self._choice_of = checkpoint.choice_of
        self._kept: dict[str, frozenset[str]] = {}
        self.states = [self._want_states(group) for group in state.optimizers.groups]
        self.generators = self._want_generators(rank) if same_plan else {}

    def _want_buffer(self, key: str, name: str, buffer: Tensor) -> None:
        """With the shape that it was saved with, where it is the same workload's: its forward may have put
        another tensor in its place.
        """
        saved = self._tensors.get(key)
        if self._carried is None and saved is not None and tuple(saved.shape) != tuple(buffer.shape):
            buffer = self._state.model.with_shape(name, saved.shape)
        self.wanted.add(key, buffer)

    def _saved_name(self, name: str) -> str | None:
        """What a parameter or buffer was saved as; None: it is new."""
        return name if self._carried is None else self._carried.kept.get(name)

    def _want_parameter(self, key: str) -> None:
        """From its float32 master, if it has one that does not go on, and not from what was rounded."""
        name, shape, region = place_of(key, self._state.model)
        saved_name = self._saved_name(name)
        if saved_name is None:
            return
        has_master = self._state.masters is None and MASTER_KEY in self._keys.get(saved_name, ())
        source = state_key(saved_name, MASTER_KEY) if has_master else model_key(saved_name)
        if key not in self._state.fetched:
            self.wanted.add_part(source, shape, region, self._state.model.parameters[key])
        for owned in self._state.fetched.get(key, ()):
            self.wanted.add_part(source, shape, region, owned.tensor, owned.part)

    def _want_states(self, group: GroupOptimizer) -> list[dict[str, Tensor]]:
        return [self._want_state(owned, group) for owned in group.owned_ranges]

    def _kept_by(self, choice: OptimizerChoice) -> frozenset[str]:
        """What an optimizer keeps; found out once, as there are many parameters."""
        key = repr(choice)
        if key not in self._kept:
            self._kept[key] = state_keys(choice)
        return self._kept[key]

    def _want_state(self, owned: OwnedRange, group: GroupOptimizer) -> dict[str, Tensor]:
        name, shape, region = place_of(owned.name, self._state.model)
        saved_name = self._saved_name(name)
        before = None if saved_name is None else self._choice_of(saved_name)
        state: dict[str, Tensor] = {}
        if saved_name is None or before is None:
            return state
        # What the settings say no more to keep. (What is kept depends on the parameter, too.)
        dropped = self._kept_by(before) - self._kept_by(group.choice)
        if self._state.masters is None:
            dropped |= {MASTER_KEY}
        if self._state.optimizers.average is None:
            dropped |= {AVERAGE_KEY}
        if self._state.outer is None or self._carried is not None:  # outer steps are a run's own
            dropped |= {COMMON_KEY, OUTER_MOMENTUM_KEY}
        for key in (key for key in self._keys.get(saved_name, ()) if key not in dropped):
            saved = self._tensors[state_key(saved_name, key)]
            is_like_parameter = saved.shape == shape
            if not is_like_parameter and prod(saved.shape) != 1:
                self._require_free_shape(group.choice, state_key(saved_name, key), saved, shape)
            size = owned.tensor.shape if is_like_parameter else saved.shape
            state[key] = torch.empty(size, dtype=getattr(torch, saved.dtype))
            if is_like_parameter:
                self.wanted.add_part(state_key(saved_name, key), shape, region, state[key], owned.part)
            else:
                self.wanted.add(state_key(saved_name, key), state[key])
        return state

    def _require_free_shape(
        self, choice: OptimizerChoice, key: str, saved: SavedTensor, shape: tuple[int, ...]
    ) -> None:
        """Fused kernels take it that all state has the parameter's shape, and look at none themselves."""
        if choice.treats_elements_alone:
            raise InputError(
                f"{self._folder}: {key} has shape {saved.shape}; its parameter has {shape}",
                hint="The checkpoint is of another version of the workload.",
            )

    def _want_generators(self, rank: int) -> dict[str, Tensor]:
        now = {random_key("cpu", rank): torch.get_rng_state()}
        if self._state.device.type == "cuda":
            now[random_key("cuda", rank)] = torch.cuda.get_rng_state(self._state.device)
        generators = {name: torch.empty_like(state) for name, state in now.items() if name in self._tensors}
        for name, generator in generators.items():
            self.wanted.add(name, generator)  # whose shape has to be that of what was saved
        return generators


def _averages(
    states_by_group: Iterable[tuple[GroupOptimizer, list[dict[str, Tensor]]]],
) -> Iterator[tuple[OwnedRange, Tensor]]:
    """Take what was saved of the weights' average out of the optimizers' state."""
    for group, states in states_by_group:
        for owned, values in zip(group.owned_ranges, states, strict=True):
            if (averaged := values.pop(AVERAGE_KEY, None)) is not None:
                yield owned, averaged


def _resume_outer(
    outer: OuterOptimizer | None, states_by_group: Iterable[tuple[GroupOptimizer, list[dict[str, Tensor]]]]
) -> None:
    """Take what was saved of outer steps out of the optimizers' state."""
    if outer is None:
        return
    for group, states in states_by_group:
        for owned, values in zip(group.owned_ranges, states, strict=True):
            kept = {key: values.pop(key) for key in (COMMON_KEY, OUTER_MOMENTUM_KEY) if key in values}
            outer.resume(owned, kept)


def _hand_over(group: GroupOptimizer, states: list[dict[str, Tensor]]) -> None:
    """Give an optimizer its state, one by one."""
    optimizer = group.optimizer
    content = optimizer.state_dict()
    for owned, values in zip(group.owned_ranges, states, strict=True):
        if (master := values.pop(MASTER_KEY, None)) is not None:
            owned.tensor.detach().copy_(master)
    content["state"] = {index: values for index, values in enumerate(states) if values}
    optimizer.load_state_dict(content)
    # It puts each tensor on the right device, but into the parameter's dtype, which is not that of every one.
    numbers = number_keys(group.choice)
    for index, owned in enumerate(group.owned_ranges):
        state = optimizer.state[owned.tensor]
        for key, value in content["state"].get(index, {}).items():
            state[key] = numbers[key](value.item()) if key in numbers else state[key].to(value.dtype)


@dataclass(frozen=True)
class Start:
    """Where training begins: steps that are done, where streams were behind them, by task, and the numbers
    that callbacks have set, by name.
    """

    step: int = 0
    streams: Mapping[str, Any] = field(default_factory=dict)
    step_values: Mapping[str, float] = field(default_factory=dict)


def resume(request: RunRequest, state: TrainState, rank: int, total_steps: int) -> Start:
    """Put the run's newest whole checkpoint in place, or one of another run, where the request says so;
    collective.

    Raises:
        InputError: there is no checkpoint, or it does not belong to this workload and its train settings.
    """
    run_dir, step = request.run_dir, request.resume_step
    if not request.resume:
        if request.begin_from is None:
            return Start()
        run_dir, step = request.begin_from, request.begin_step
    # Rank 0 chooses, so that all ranks take the same one whatever happens to the files meanwhile.
    chosen = [find_checkpoint(run_dir, step=step) if rank == 0 else None]
    dist.broadcast_object_list(chosen, group=host_group())
    (stored,) = chosen
    assert stored is not None
    require_steps_left(stored, total_steps)
    carried = None
    if request.resume:
        model = state.model
        require_same_run(
            stored.checkpoint,
            model.graph.fingerprint,
            model.train,
            model.groups.names(),
            request.dtype,
            stored.folder,
        )
    else:
        carried = carried_over(stored.checkpoint, state.model.graph)
        require_same_optimizer(stored.checkpoint, carried, state.model.groups, stored.folder)
    restore(stored.folder, stored.checkpoint, state, rank, carried)
    there = {key: value for key, value in state.model.parameters.items() if key not in state.fetched}
    check_replicas(state.model.cuts.keys, there)
    return Start(stored.checkpoint.step, stored.checkpoint.streams, stored.checkpoint.step_values)
