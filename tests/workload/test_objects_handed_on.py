"""What operators hand on in objects: named tuples and dataclasses stay what they are, others are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.training.batches import Batches
from spindle_cli.workload.types import Task, Workload

from .shares import assert_trains_as_plain
from .toy import WIDTH, Items


class Named(NamedTuple):
    value: Tensor
    skip: Tensor


@dataclass
class State:
    value: Tensor
    skip: Tensor
    depth: int = 0
    mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Tensor
    skip: Tensor


@dataclass
class Checked(State):
    """Does more than hold its fields."""

    def __post_init__(self) -> None:
        self.value = self.value * 2


class Plain:
    def __init__(self, value: Tensor, skip: Tensor) -> None:
        self.value, self.skip = value, skip


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


class OfStates(nn.Module):
    """Changes them between its layers, puts them into other containers, and reads what is no tensor."""

    def __init__(self, way: Callable[[OfStates, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Deeper() for _ in range(3))
        self.pair, self.way = Pair(), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, self.first(x))


class Deeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State) -> State:
        value = self.linear(state.value) * (1.0 if state.mask is None else state.mask)
        return replace(state, value=value, skip=state.skip + torch.tanh(value), depth=state.depth + 1)


class Pair(nn.Module):
    """Takes and gives states inside of other containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, states: dict[str, Any]) -> tuple[State, list[Tensor]]:
        one, other = states["both"]
        return State(self.linear(one.value), other.skip), [one.skip]


def chain(net: OfStates, x: Tensor) -> Tensor:
    state = State(x, x * 2)
    for layer in net.layers:
        state = layer(state)
    return (state.value + state.skip).pow(2).mean() * state.depth


def changed_between(net: OfStates, x: Tensor) -> Tensor:
    state = net.layers[0](State(x, x * 2, mask=x.sigmoid()))
    state.value = state.value + x
    state = net.layers[1](replace(state, skip=state.value, mask=None))
    return (state.value + net.layers[2](state).skip).pow(2).mean()


def decided(net: OfStates, x: Tensor) -> Tensor:
    state = State(x, x)
    while state.depth < len(net.layers):
        state = net.layers[state.depth](state)
    return state.skip.pow(2).mean()


def without_gradient(net: OfStates, x: Tensor) -> Tensor:
    with torch.no_grad():
        state = net.layers[0](State(x, x))
    return (net.layers[1](state).skip + net.layers[2](State(x, x)).value).pow(2).mean()


def nested(net: OfStates, x: Tensor) -> Tensor:
    first = net.layers[0](State(x, x))
    state, (skip,) = net.pair({"both": (first, net.layers[1](first))})
    return (net.layers[2](state).value + skip).pow(2).mean()


@pytest.mark.parametrize("made", [State, Frozen, Named])
def test_layers_that_hand_on_dataclasses_are_split_and_train_as_plain_pytorch(made: Any) -> None:
    plain, traced = (workload(Net(made), Layer) for _ in range(2))
    graph = analysed(traced).tasks["t"]
    traced.tasks[0].module.load_state_dict(plain.tasks[0].module.state_dict())
    assert [op.coupled_because for op in graph.ops] == [None] * 3
    batch = Batches(plain.tasks[0], seed=1).rows(0, 0, 5)
    assert_trains_as_plain(plain.tasks[0], graph, batch, [0, 2, 5])


@pytest.mark.parametrize("way", [chain, changed_between, decided, without_gradient, nested])
def test_dataclasses_may_be_changed_and_read_between_layers(
    way: Callable[[OfStates, Tensor], Tensor],
) -> None:
    operators = (Deeper, Pair) if way is nested else (Deeper,)
    plain, traced = (workload(OfStates(way), *operators) for _ in range(2))
    graph = analysed(traced).tasks["t"]
    traced.tasks[0].module.load_state_dict(plain.tasks[0].module.state_dict())
    assert not any(op.coupled for op in graph.ops)
    assert {op.target for op in graph.ops} >= {f"layers.{number}" for number in range(3)}
    batch = Batches(plain.tasks[0], seed=1).rows(0, 0, 5)
    assert_trains_as_plain(plain.tasks[0], graph, batch, [0, 2, 5])


class Setting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State) -> State:
        state.value = self.linear(state.value)
        return state


class OfSetting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Setting()

    def forward(self, x: Tensor) -> Tensor:
        state = State(x, x)
        self.layer(state)
        return state.value.mean()


def test_a_layer_that_sets_fields_of_what_it_is_given_is_refused_as_such() -> None:
    with pytest.raises(WorkloadError, match=r"'layer' \(Setting\) sets fields of a State that it was given"):
        analysed(workload(OfSetting(), Setting))


def test_a_dataclass_that_does_more_than_hold_its_fields_is_refused_with_its_place() -> None:
    with pytest.raises(WorkloadError, match=r"test_objects_handed_on\.py:\d+: task 't': .* gives a Checked"):
        analysed(workload(Net(Checked), Layer))


@dataclass
class Counted:
    value: Tensor
    width: int = field(init=False)

    def __post_init__(self) -> None:
        self.width = self.value.shape[-1]


class OfCounted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(Counted)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(Counted(x)).value.mean()


def test_a_dataclass_that_computes_what_it_has_is_refused_where_forward_makes_it() -> None:
    said = r"test_objects_handed_on\.py:\d+: task 't': forward makes a Counted, .* more than its fields"
    with pytest.raises(WorkloadError, match=said):
        analysed(workload(OfCounted(), Layer))


def test_layers_that_hand_on_other_objects_run_whole() -> None:
    plain, traced = (workload(Net(Plain), Layer) for _ in range(2))
    graph = analysed(traced).tasks["t"]
    traced.tasks[0].module.load_state_dict(plain.tasks[0].module.state_dict())
    assert any(op.coupled for op in graph.ops)
    batch = Batches(plain.tasks[0], seed=1).rows(0, 0, 5)
    assert_trains_as_plain(plain.tasks[0], graph, batch, [0, 2, 5])


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
