"""What operators hand on in objects: named tuples stay named tuples, other objects are refused."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Items


class Named(NamedTuple):
    value: Tensor
    skip: Tensor


@dataclass
class State:
    value: Tensor
    skip: Tensor


class Layer(nn.Module):
    """Takes two tensors in an object, and gives two."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(WIDTH, WIDTH), made

    def forward(self, state: Any) -> Any:
        return self.made(self.linear(state.value) + state.skip, torch.tanh(state.value))


class Net(nn.Module):
    def __init__(self, made: Any) -> None:
        super().__init__()
        self.layers, self.made = nn.ModuleList([Layer(made) for _ in range(3)]), made

    def forward(self, x: Tensor) -> Tensor:
        state = self.made(x, x * 2)
        for layer in self.layers:
            state = layer(state)
        return (state.value + state.skip).pow(2).mean()  # type: ignore[no-any-return]


class Worst(nn.Module):
    """The mean of the three largest losses: there are none of two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean((1, 2)).topk(3).values.mean()  # type: ignore[no-any-return]


def workload(module: nn.Module, *operators: type[nn.Module]) -> Workload:
    return Workload("w", [Task("t", module, 5, Items(x=(4, WIDTH)))], operators)


def test_layers_that_hand_on_named_tuples_are_split() -> None:
    graph = analysed(workload(Net(Named), Layer))
    assert [op.coupled_because for op in graph.tasks["t"].ops] == [None] * 3


def test_an_object_with_tensors_in_it_is_refused_with_its_class_and_place() -> None:
    with pytest.raises(WorkloadError, match=r"test_objects_handed_on\.py:\d+: task 't': .* gives a State"):
        analysed(workload(Net(State), Layer))


def test_a_loss_that_fails_for_few_samples_is_whole_and_no_traceback_is_printed() -> None:
    printed: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = printed.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        graph = analysed(workload(Worst(), nn.Linear))
    finally:
        logger.removeHandler(handler)
    assert graph.tasks["t"].ops[-1].coupled
    assert not printed


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        state["value"] = self.linear(state["value"])
        return state


class OfDicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = InPlace()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer({"value": x})["value"].pow(2).mean()  # type: ignore[no-any-return]


def test_a_layer_that_changes_the_dict_that_it_is_given_is_refused_as_such() -> None:
    with pytest.raises(WorkloadError, match=r"'layer' \(InPlace\) changes a list or dict that it was given"):
        analysed(workload(OfDicts(), InPlace))


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        loss = self.layer(x).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.pow(2).mean()  # type: ignore[no-any-return]


def test_gradients_that_are_asked_for_between_operators_are_refused_as_such() -> None:
    with pytest.raises(WorkloadError, match="asks for gradients between operators"):
        analysed(workload(Penalised(), nn.Linear))


class Rebuilt(nn.Module):
    """Makes the named tuple anew between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Layer(Named) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        state = Named(hidden, x)
        for layer in self.layers:
            state = layer(state._replace(value=state.value * 2))
        return (state.value + state.skip).pow(2).mean()


def test_a_named_tuple_that_forward_makes_of_what_operators_give_is_handed_on_by_its_tensors() -> None:
    graph = analysed(workload(Rebuilt(), nn.Linear, Layer))
    ops = graph.tasks["t"].ops
    assert [(len(op.outputs), op.coupled) for op in ops] == [(1, False), (2, False), (0, False)]
