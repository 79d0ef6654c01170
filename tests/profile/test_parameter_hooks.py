"""Hooks on parameters' gradients: taken where they add up over the parts of a gradient, else refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.operators.tensor_parallel import layer_split
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.profile.numeric_check import NumericCheck
from spindle_cli.workload.building.memory import drop, to_meta
from spindle_cli.workload.types import Task, Workload

WIDTH = 4
MASK = torch.tensor([0.0, 1.0, 0.0, 1.0])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).pow(2).mean()  # type: ignore[no-any-return]


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))}


def checked(hook: Callable[[Tensor], Any], *, after: bool = False, losses_only: bool = False) -> NumericCheck:
    net = Net()
    weight: Any = net.first.linear.weight
    (weight.register_post_accumulate_grad_hook if after else weight.register_hook)(hook)
    workload = Workload("w", [Task("t", net, 4, Rows())], (Layer,))
    return check_numbers(analysed(workload), 0, CheckSettings(losses_only=losses_only))


def logs(_: Tensor) -> None:
    """Looks, and changes nothing."""


@pytest.mark.parametrize("hook", [lambda g: g * MASK, lambda g: 0.1 * g, torch.nan_to_num, logs])
def test_a_hook_that_adds_up_is_taken(hook: Callable[[Tensor], Any]) -> None:
    (task,) = checked(hook).tasks
    assert not task.whole and not task.unchecked


@pytest.mark.parametrize(
    "hook",
    [
        lambda g: g.clamp(-0.01, 0.01),
        lambda g: g.clamp(-100, 100),
        lambda g: g / g.norm(),
        lambda g: torch.where(g.abs() < 1e-8, 0.0, g),
        torch.sign,
        lambda g: g + 0.1,
    ],
)
def test_a_hook_that_gives_another_result_for_a_sum_is_refused(hook: Callable[[Tensor], Any]) -> None:
    with pytest.raises(
        WorkloadError, match=r"a hook on the gradient of the parameter 'first\.linear\.weight'"
    ):
        checked(hook)


class Moving(Layer):
    """Its weight is moved by a function's backward pass, or by what is called there."""

    def __init__(self, moves: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.moves = moves

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.moves(self.linear.weight))  # type: ignore[no-untyped-call]
        return y


def by_array(weight: Tensor) -> None:
    weight.detach().numpy()[...] *= 0.9


def by_data(weight: Tensor) -> None:
    weight.data.mul_(0.9)


MOVES = [by_data, by_array]


@pytest.mark.parametrize("moves", MOVES, ids=["data", "array"])
@pytest.mark.parametrize("own", [True, False], ids=["its own", "another"])
@pytest.mark.parametrize("on_meta", [True, False], ids=["meta", "real"])
def test_a_hook_on_a_gradient_that_writes_into_a_parameter_is_refused(
    moves: Callable[[Tensor], object], own: bool, on_meta: bool
) -> None:
    """`profile` has parameters on the meta device, and the hook may have one itself, not by its name."""
    net = Net()
    written = (net.first if own else net.second).linear.weight
    net.first.linear.weight.register_hook(lambda _: moves(written))  # type: ignore[no-untyped-call]
    if on_meta:
        drop(net.parameters())
    workload = Workload("w", [Task("t", net, 4, Rows())], (Layer,))
    name = f"{'first' if own else 'second'}.linear.weight"
    with pytest.raises(
        WorkloadError,
        match=rf"test_parameter_hooks.*'first.linear.weight' writes into the parameter '{name}'",
    ) as error:
        check_numbers(analysed(workload), 0, CheckSettings())
    assert "Constraint" in str(error.value.hint)
    assert written.is_meta == on_meta


@pytest.mark.parametrize("moves", MOVES, ids=["data", "array"])
def test_a_backward_pass_that_writes_into_a_parameter_is_refused(moves: Callable[[Tensor], object]) -> None:
    net = Net()
    net.second = Moving(moves)
    workload = Workload("w", [Task("t", net, 4, Rows())], (Layer, Moving))
    expected = (
        r"test_parameter_hooks.*: the backward pass of second writes into the parameter 'second\.linear"
    )
    with pytest.raises(WorkloadError, match=expected):
        check_numbers(analysed(workload), 0, CheckSettings())


class MovingWhole(Moving):
    """Centres its batch."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(0)


class MovingByValues(Moving):
    """Cannot be followed without values."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (1.0 + float(x.detach().sum() > 0))


@pytest.mark.parametrize("moves", MOVES, ids=["data", "array"])
@pytest.mark.parametrize("kind", [MovingWhole, MovingByValues])
@pytest.mark.parametrize("is_last", [True, False])
def test_a_backward_pass_that_writes_is_refused_in_an_op_that_runs_whole(
    moves: Callable[[Tensor], object], kind: type[Moving], is_last: bool
) -> None:
    net = Net()
    name = "second" if is_last else "first"
    setattr(net, name, kind(moves))
    graph = analysed(Workload("w", [Task("t", net, 4, Rows())], (Layer, kind)))
    assert [op.coupled for op in graph.tasks["t"].ops if op.target == name] == [True]
    expected = (
        rf"test_parameter_hooks.*: the backward pass of {name} writes into the parameter '{name}\.linear"
    )
    with pytest.raises(WorkloadError, match=expected):
        check_numbers(graph, 0, CheckSettings())


def test_a_backward_pass_that_writes_nothing_is_taken_in_an_op_that_runs_whole() -> None:
    net = Net()
    net.second = MovingWhole(logs)
    (task,) = check_numbers(
        analysed(Workload("w", [Task("t", net, 4, Rows())], (Layer,))), 0, CheckSettings()
    ).tasks
    assert not task.whole and not task.unchecked and task.checked


def test_a_hook_on_the_accumulated_gradient_is_refused() -> None:
    with pytest.raises(WorkloadError, match="called when its gradient is accumulated"):
        checked(logs, after=True)


def test_an_estimate_refuses_hooks_too() -> None:
    with pytest.raises(WorkloadError, match="a hook on the gradient"):
        checked(torch.sign, losses_only=True)


def test_ops_whose_hook_cannot_be_tried_are_not_checked() -> None:
    on_meta = MASK.to("meta")
    (task,) = checked(lambda g: g * on_meta).tasks
    (why,) = task.unchecked.values()
    assert why.startswith("a hook on the gradient of 'first.linear.weight' was not tried")


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def test_a_layer_whose_parameter_has_a_hook_is_not_split_by_its_channels() -> None:
    net = nn.ModuleList([Wide(), Wide()])
    net[0].up.weight.register_hook(lambda g: g * MASK)  # type: ignore[union-attr, operator]
    chain = Chain(net)
    plans = {Wide: {"up": "colwise", "down": "rowwise"}}
    workload = Workload("w", [Task("t", chain, 4, Rows())], (Wide,), tp_plans=plans)
    task = analysed(workload).tasks["t"]
    hooked, free = (layer_split(workload, task, op, 2) for op in task.ops)
    assert hooked is None and free is not None


class Chain(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def test_a_parameter_that_is_moved_to_the_meta_device_keeps_its_hook() -> None:
    parameter: Any = nn.Parameter(torch.ones(2))
    called: list[str] = []
    parameter.register_hook(lambda _: called.append("hook"))
    to_meta(parameter)
    parameter.sum().backward()
    assert called == ["hook"]
