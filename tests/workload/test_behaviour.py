"""Layers that share a verdict do the same."""

from __future__ import annotations

import operator
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from spindle_cli.analysis.tracing.behaviour import behaviour_of, name_of


class Layer(nn.Module):
    def __init__(self, setting: Any = None, buffer: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.setting = setting
        self.register_buffer("mask", buffer)


class Config:
    def __init__(self, rate: float) -> None:
        self.rate = rate


def scaled(factor: float) -> Any:
    return lambda x: x * factor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, 0.5),
        (1, 2),
        (True, False),
        ({"alpha": 1.0}, {"alpha": 2.0}),
        ([1, [2.0]], [1, [3.0]]),
        (functional.relu, functional.gelu),
        (scaled(1.0), scaled(2.0)),
        (Config(0.1), Config(0.2)),
        (torch.zeros(3), torch.ones(3)),
        (torch.float32, torch.float64),
    ],
)
def test_settings_of_every_kind_tell_layers_apart(one: Any, other: Any) -> None:
    assert behaviour_of(Layer(one)) != behaviour_of(Layer(other))
    assert behaviour_of(Layer(one)) == behaviour_of(Layer(one))


def test_equal_settings_that_are_other_objects_do_not() -> None:
    assert behaviour_of(Layer(Config(0.1))) == behaviour_of(Layer(Config(0.1)))
    assert behaviour_of(Layer(scaled(2.0))) == behaviour_of(Layer(scaled(2.0)))


def test_values_of_buffers_tell_layers_apart_and_those_of_parameters_do_not() -> None:
    assert behaviour_of(Layer(buffer=torch.zeros(3))) != behaviour_of(Layer(buffer=torch.ones(3)))
    assert behaviour_of(Layer(buffer=torch.zeros(3))) == behaviour_of(Layer(buffer=torch.zeros(3)))


def test_training_tells_layers_apart() -> None:
    assert behaviour_of(Layer()) != behaviour_of(Layer().eval())


def test_functions_are_named_where_every_process_finds_them() -> None:
    assert name_of(functional.relu) == "torch.nn.functional.relu"
    assert name_of(operator.add) == "_operator.add"
    assert name_of("view") == "'view'"
    assert " at 0x" in name_of(scaled(1.0))  # there may be others of its name
    renamed = types.FunctionType(functional.relu.__code__, {}, "relu")
    renamed.__module__, renamed.__qualname__ = "torch.nn.functional", "relu"
    assert " at 0x" in name_of(renamed)  # what bears the name is another
