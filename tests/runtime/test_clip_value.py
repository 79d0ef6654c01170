"""Gradients clipped by value: each element as torch does it, before its update, part by part or at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from spindle_cli.errors import InputError
from spindle_cli.runtime.update.gradient_check import GradientCheck
from spindle_cli.runtime.update.optimizers import Optimizers
from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.runtime.update.update import Update
from spindle_cli.training.optimizing.groups import OptimizerGroups
from spindle_cli.workload.file import TrainSettings, WorkloadFile

CPU = torch.device("cpu")
GRADIENTS = [[0.5, -0.5, 0.05, math.nan, 0.0], [3.0, -0.1]]
CLIPPED = [[0.1, -0.1, 0.05, math.nan, 0.0], [0.1, -0.1]]


@pytest.mark.parametrize("in_parts", [False, True])
def test_each_element_is_clipped_once_before_its_own_update(in_parts: bool) -> None:
    train = TrainSettings(optimizer="SGD", lr=1.0, clip_value=0.1)
    values = [nn.Parameter(torch.zeros(len(each))) for each in GRADIENTS]
    ranges = [OwnedRange(name, None, value) for name, value in zip("ab", values, strict=True)]
    optimizers = Optimizers.of(train, OptimizerGroups(train.choices, {"a": 0, "b": 0}), ranges)
    update = Update(optimizers, ranges, None, None, None, train.clip_value, CPU)
    for value, gradient in zip(values, GRADIENTS, strict=True):
        value.grad = torch.tensor(gradient)
    losses = torch.ones(1)
    if in_parts:
        update.step_part(losses, frozenset({"b"}))
        assert torch.equal(values[0], torch.zeros(5))
        # Its gradients may not be summed yet.
        torch.testing.assert_close(values[0].grad, torch.tensor(GRADIENTS[0]), rtol=0, atol=0, equal_nan=True)
    update.step(losses, GradientCheck(), frozenset({"a"}) if in_parts else None)
    for value, clipped in zip(values, CLIPPED, strict=True):
        torch.testing.assert_close(value.detach(), -torch.tensor(clipped), equal_nan=True)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"clip_value": 0}, "train.clip_value: expected a number greater than 0"),
        ({"clip_value": 1, "clip_norm": 2}, "clip_norm: 2 and clip_value: 1: expected one of them"),
    ],
)
def test_it_is_one_positive_number_and_stands_alone(train: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        WorkloadFile.from_data(
            {"schema": "spindle.workload/1", "model": "a:b", "train": train}, where="w.yaml"
        )


def test_nothing_is_found_out_about_all_gradients_first() -> None:
    """So parameters may be updated in parts, as without it."""
    assert TrainSettings(clip_value=0.1, shard_optimizer=False).updates_by_parts
    assert not TrainSettings(clip_norm=0.1, shard_optimizer=False).updates_by_parts
