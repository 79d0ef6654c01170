"""Layers that differ in their number alone are looked at once, unless their forward looks at the number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.layer_numbers import Findings
from spindle_cli.analysis.tracing.behaviour import behaviour_of
from spindle_cli.workload.types import Task, Workload

WIDTH = 3


class Layer(nn.Module):
    """`looks`: what its forward does with the number."""

    block_id = 7  # of the class

    def __init__(self, number: int, looks: Callable[[Layer], int] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.layer_idx = number
        self.looks = looks

    def forward(self, x: Tensor) -> Tensor:
        if self.looks is not None and self.looks(self) % 2:
            x = x.flip(0)  # the samples in another order
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, looks: Callable[[Layer], int] | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number, looks) for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def by_name(layer: Layer) -> int:
    return layer.layer_idx


def by_getattr(layer: Layer) -> int:
    return int(getattr(layer, "layer_idx", 0))


def by_dict(layer: Layer) -> int:
    return int(layer.__dict__["layer_idx"])


def by_vars(layer: Layer) -> int:
    return int(vars(layer).get("layer_idx", "no number"))


def counted(layer: Layer) -> int:
    layer.layer_idx += 2
    return layer.layer_idx


@pytest.mark.parametrize("looks", [by_name, by_getattr, by_dict, by_vars])
def test_layers_that_look_at_their_number_are_each_judged_by_it(looks: Callable[[Layer], int]) -> None:
    items = [{"x": torch.zeros(WIDTH)} for _ in range(4)]
    graph = analysed(Workload("w", [Task("t", Net(looks), 4, items)], operators=(Layer,)))
    assert [op.coupled for op in graph.tasks["t"].ops] == [False, True, False, True]


def test_a_number_that_forward_changes_is_noticed() -> None:
    items = [{"x": torch.zeros(WIDTH)} for _ in range(4)]
    net = Net(counted)
    graph = analysed(Workload("w", [Task("t", net, 4, items)], operators=(Layer,)))
    assert all(op.coupled for op in graph.tasks["t"].ops)
    assert [layer.__dict__["layer_idx"] for layer in net.layers] == [0, 1, 2, 3]


class Calls:
    """Finds what a layer gives, and counts how often it is asked."""

    def __init__(self) -> None:
        self.count = 0
        self.findings: Findings[str] = Findings(lambda _: None)

    def of(self, layer: Layer, *, holds: bool = True) -> str:
        texts = behaviour_of(layer, numbered=False), behaviour_of(layer)

        def find() -> str:
            self.count += 1
            layer(torch.zeros(2, WIDTH))
            return f"of {self.count}"

        return self.findings.of(texts, layer, find, lambda _: holds)


def test_what_is_found_of_one_holds_for_layers_with_other_numbers() -> None:
    calls = Calls()
    assert [calls.of(Layer(number)) for number in (0, 1, 2)] == ["of 1"] * 3


def test_of_layers_that_look_each_number_is_found_by_itself() -> None:
    calls = Calls()
    found = [calls.of(Layer(number, by_name)) for number in (0, 1, 0)]
    assert len(set(found[:2])) == 2 and found[2] == found[0]


def test_what_does_not_hold_is_found_again_with_the_number() -> None:
    calls = Calls()
    assert calls.of(Layer(0), holds=False) == "of 2"
    assert calls.of(Layer(1), holds=False) == "of 4"


def test_layers_and_their_classes_are_left_as_they_were() -> None:
    layer = Layer(5)
    layer.block_id = 9
    Calls().of(layer)
    assert (layer.__dict__["layer_idx"], layer.__dict__["block_id"]) == (5, 9)
    assert "layer_idx" not in vars(Layer) and Layer.block_id == 7


def test_other_attributes_than_numbers_of_layers_tell_layers_apart() -> None:
    one, other = Layer(0), Layer(0)
    other.window = 4
    assert behaviour_of(one, numbered=False) != behaviour_of(other, numbered=False)
    flagged = Layer(0)
    flagged.layer_idx = True
    assert behaviour_of(one, numbered=False) != behaviour_of(flagged, numbered=False)
