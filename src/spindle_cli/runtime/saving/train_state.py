"""What a rank's training consists of, apart from the step: what a checkpoint saves, and puts back.

Which samples of a map-style dataset a step takes follows from the step alone (training/batches.py);
where streams are is saved beside it (runtime/loading).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spindle_cli.checkpoint.index import AVERAGE_KEY, Region, buffer_key, model_key, random_key, state_key
from spindle_cli.checkpoint.tensors import HeldTensor, HeldTensors
from spindle_cli.files.tensors import parse_key
from spindle_cli.runtime.islands.outer import OuterOptimizer
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.runtime.saving.frozen import moved_here
from spindle_cli.runtime.saving.save import Whole
from spindle_cli.runtime.update.loss_scale import LossScale
from spindle_cli.runtime.update.masters import MASTER_KEY, Masters
from spindle_cli.runtime.update.optimizers import GroupOptimizer, Optimizers
from spindle_cli.runtime.update.owned_ranges import OwnedRange


@dataclass(frozen=True)
class TrainState:
    """A rank's part of the model, and what changes it. `owned_ranges`: what `optimizers` step; with
    `masters` it is those. `fetched`: by leaf, what this rank has of what is whole in passes alone; `whole`
    makes it so, of all ranks together. `loss_scale`: the same on every rank; None: losses are not scaled.
    `outer`: what brings islands together; None: there are none.
    """

    model: LocalModel
    owned_ranges: tuple[OwnedRange, ...]
    masters: Masters | None
    optimizers: Optimizers
    device: torch.device
    fetched: Mapping[str, tuple[OwnedRange, ...]]
    whole: Whole
    loss_scale: LossScale | None = None
    outer: OuterOptimizer | None = None


@dataclass(frozen=True)
class Numbers:
    """See `Checkpoint`: of an optimizer group, the same on every rank that steps any of it."""

    hyperparameters: dict[str, Any]
    schedule: dict[str, Any]


# By the group's name; None is that of all parameters.
NumbersOfGroups = dict[str | None, Numbers]


def held_by(state: TrainState, rank: int) -> dict[str, HeldTensor]:
    """What a rank can save: parameters that are trained, its owned ranges' optimizer state, its own buffers
    and random state. What is not trained, and moved by no operator, is saved once a run (frozen.py).

    Buffers and random states are copies; all else changes with the next update.
    """
    held = HeldTensors()
    moved = moved_here(state.model)
    for key, parameter in state.model.parameters.items():
        name, shape, region = place_of(key, state.model)
        if not parameter.requires_grad and name not in moved:
            continue
        if key not in state.fetched:
            held.add_part(model_key(name), shape, region, parameter)
        for owned in state.fetched.get(key, ()):
            held.add_part(model_key(name), shape, region, owned.tensor, owned.part)
    for group in state.optimizers.groups:
        for owned in group.owned_ranges:
            for key, value in _state_of(owned, group, state):
                _add_state(held, key, owned, value, state.model)
    for name, buffer in state.model.buffers.items():
        held.add(buffer_key(name, rank), buffer.clone())
    held.add(random_key("cpu", rank), torch.get_rng_state())
    if state.device.type == "cuda":
        held.add(random_key("cuda", rank), torch.cuda.get_rng_state(state.device))
    return held.by_name()


def place_of(key: str, model: LocalModel) -> tuple[str, tuple[int, ...], Region]:
    """The place of a leaf that this rank holds: the whole parameter's name and shape, and which part of it
    the leaf is.
    """
    name, fragment = parse_key(key)
    shape = list(model.parameters[key].shape)
    if fragment is None or key in model.cuts.by_name:  # which a name may look like
        return key, tuple(shape), Region.whole(shape)
    shape[fragment.dim] = model.cuts.by_name[name].size
    return name, tuple(shape), Region.of_fragment(shape, fragment)


def _state_of(owned: OwnedRange, group: GroupOptimizer, state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """What the optimizer has for an owned range, by its own keys."""
    if state.masters is not None:
        yield MASTER_KEY, owned.tensor
    average = state.optimizers.average
    if average is not None and (averaged := average.of(owned)) is not None:
        yield AVERAGE_KEY, averaged
    if state.outer is not None:
        yield from state.outer.state_of(owned)
    for key, value in group.optimizer.state.get(owned.tensor, {}).items():
        if value is not None:  # SGD without momentum
            yield key, torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _add_state(held: HeldTensors, key: str, owned: OwnedRange, value: Tensor, model: LocalModel) -> None:
    """State that has the owned range's elements is a part of a tensor of the parameter's shape; other state
    (a count of steps, the factors of a matrix) stands alone.
    """
    name, shape, region = place_of(owned.name, model)
    if value.shape == owned.tensor.shape:
        held.add_part(state_key(name, key), shape, region, value, owned.part)
    else:
        held.add(state_key(name, key), value)


def numbers_of(state: TrainState) -> NumbersOfGroups:
    """The optimizers' and their schedules' numbers, of the groups of which this rank steps anything."""
    return {group.choice.name: _numbers_of(group) for group in state.optimizers.groups}


def _numbers_of(group: GroupOptimizer) -> Numbers:
    schedule = {} if group.schedule is None else group.schedule.state_dict()
    return Numbers(_only_numbers(group.numbers), _only_numbers(schedule))


def _only_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and lists of them: what steps change. All else follows from the train settings."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    return {
        key: value
        for key, value in values.items()
        if is_number(value) or (isinstance(value, list | tuple) and all(map(is_number, value)))
    }
