"""For which inputs an op gives gradients is what autograd says; so is whether its forward asks for some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from helpers.layers import Stop
from spindle_cli.analysis.analyse import analyse, analyse_for_others
from spindle_cli.operators.tensor_parallel import describe_ways, layer_split
from spindle_cli.profile.checking.matrices import Matrices
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Items

BATCH = 4


class Join(nn.Module):
    """Takes two values, and uses the second one as `way` says."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.way, self.map = way, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.map(x) + self.way(y)  # type: ignore[no-any-return]


def _under_no_grad(y: Tensor) -> Tensor:
    with torch.no_grad():
        return 2 * y


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "used": (lambda y: 2 * y, ("first", "second")),
    "zero times": (lambda y: 0 * y, ("first", "second")),
    "detached": (lambda y: y.detach(), ("first",)),
    "under no_grad": (_under_no_grad, ("first",)),
    "its shape": (lambda y: torch.ones(y.shape), ("first",)),
    "compared": (lambda y: (y > 0).to(y.dtype), ("first",)),
    "stopped": (lambda y: Stop.apply(y), ("first",)),  # type: ignore[no-untyped-call]
}


class Net(nn.Module):
    def __init__(self, way: Callable[[Tensor], Tensor], *, inside: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = Block(), Block(), Block()
        self.join, self.way, self.inside = Join(way), way, inside

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.first(x), self.second(x)
        joined = self.join(one, two) if self.inside else one + self.way(two)
        return self.last(joined).pow(2).mean()  # type: ignore[no-any-return]


def task_of(module: nn.Module, *operators: type[nn.Module], **fields: Any) -> TaskGraph:
    torch.manual_seed(0)
    items = Items(**(fields or {"x": (4, WIDTH)}))
    return analysed(Workload("w", [Task("t", module, BATCH, items)], operators)).tasks["t"]


@pytest.mark.parametrize("name", WAYS)
def test_an_operator_gives_gradients_for_what_autograd_comes_to(name: str) -> None:
    way, given = WAYS[name]
    task = task_of(Net(way, inside=True), Block, Join)
    join = next(op for op in task.ops if op.target == "join")
    assert set(join.inputs) == {"first", "second"}
    assert join.gradients == given


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", WAYS)
def test_op_by_op_parameters_have_a_gradient_where_they_have_one_in_plain_pytorch(
    name: str, inside: bool
) -> None:
    if name == "stopped" and not inside:
        return  # refused between operators
    task = task_of(Net(WAYS[name][0], inside=inside), Block, *((Join,) if inside else ()))
    x = torch.randn(BATCH, 4, WIDTH)
    task.root(x=x).backward()
    plain = {name: each.grad for name, each in task.root.named_parameters()}
    task.root.zero_grad()
    known: dict[str, Tensor] = {"x": x}
    runs = []
    for op in task.ops:
        taken = {
            value: known[value].detach().requires_grad_(task.values[value].requires_grad)
            for value in op.inputs
        }
        result = task.op_module(op)(*(known[field] for field in op.fields), *taken.values())
        given = dict(zip(op.outputs, result, strict=True)) if not op.is_loss else {"": result}
        known |= given
        runs.append((op, taken, given))
    gradients: dict[str, Tensor] = {"": torch.ones(())}
    for op, taken, given in reversed(runs):
        ends = [value for value in given if value in gradients and given[value].requires_grad]
        if ends:
            torch.autograd.backward([given[end] for end in ends], [gradients[end] for end in ends])
        found = {value: leaf.grad for value, leaf in taken.items() if leaf.grad is not None}
        assert tuple(found) == op.gradients
        for value, gradient in found.items():
            gradients[value] = gradients.get(value, 0) + gradient
    for parameter, gradient in plain.items():
        own = task.root.get_parameter(parameter).grad
        assert (own is None) == (gradient is None), parameter
        if own is not None:
            torch.testing.assert_close(own, gradient)


class Ends(nn.Module):
    """Two values come of an operator, of which one ends in what gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.two = Block(), Block(), Pair()
        self.behind, self.last = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.two(self.first(x), self.second(x))
        target = self.behind(other).detach()
        return (self.last(one) - target).pow(2).mean()  # type: ignore[no-any-return]


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, 3 * y


def test_gradients_come_back_from_the_outputs_alone_that_one_comes_to() -> None:
    task = task_of(Ends(), Block, Pair)
    by_target = {op.target: op for op in task.ops}
    assert by_target["two"].gradients == ("first",)
    assert by_target["behind"].gradients == ()
    assert by_target["first"].gradients == ()
    assert {value for op in task.ops for value in op.gradients} >= {"first", "last"}


class Slope(nn.Module):
    """Asks for a gradient by `ask`."""

    def __init__(self, ask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.map, self.ask = nn.Linear(WIDTH, WIDTH), ask

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ask(torch.tanh(self.map(x)), x)


def _by_func(_: Tensor, x: Tensor) -> Tensor:
    return torch.func.grad(lambda each: each.pow(3).sum())(x)  # type: ignore[no-any-return]


ASKS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "grad": (lambda y, x: torch.autograd.grad(y.sum(), x, create_graph=True)[0], True),
    "jacobian": (
        lambda _, x: torch.autograd.functional.vjp(lambda each: each.pow(3).sum(), x, create_graph=True)[1],
        True,
    ),
    "torch.func": (_by_func, True),
    "nothing": (lambda y, _: y, False),
}


class Sloped(nn.Module):
    def __init__(self, ask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.slope, self.last = Block(), Slope(ask), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.slope(self.first(x))).pow(2).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ASKS)
def test_it_is_known_of_an_operator_whether_it_asks_for_gradients(name: str) -> None:
    ask, asks = ASKS[name]
    task = task_of(Sloped(ask), Block, Slope)
    assert {op.target: op.asks_gradients for op in task.ops} == {
        "first": False,
        "slope": asks,
        "last": False,
    }
    assert task.ops[1].gradients == ("first",)


@pytest.mark.parametrize("name", ["grad", "nothing"])
def test_what_asks_for_gradients_is_neither_split_nor_are_its_gradients_gathered(name: str) -> None:
    torch.manual_seed(0)
    ask, asks = ASKS[name]
    task = Task("t", Sloped(ask), 2, Items(x=(WIDTH,)))
    plans: Any = {Slope: {"map": "colwise"}}
    workload = Workload("w", [task], (Block, Slope), tp_plans=plans)
    graph = analysed(workload)
    slope = graph.tasks["t"].ops[1]
    gathered = Matrices.find(graph, TrainSettings()).by_op
    assert (("t", 1) in gathered) is not asks
    if asks:
        assert layer_split(workload, graph.tasks["t"], slope, 2) is None
        assert describe_ways(workload, graph.tasks["t"], slope) == "Slope asks for gradients itself"


def test_other_processes_are_told_and_find_the_same() -> None:
    made = Workload(
        "w", [Task("t", Net(WAYS["detached"][0], inside=True), BATCH, Items(x=(4, WIDTH)))], (Block, Join)
    )
    graph, memo = analyse_for_others(made)
    assert memo.flows and all(isinstance(flow.asks, bool) for flow in memo.flows.values())
    # What is told is taken as it is.
    wrong = {key: flow.model_copy(update={"asks": True}) for key, flow in memo.flows.items()}
    told = analyse(made, memo.model_copy(update={"flows": wrong}))
    assert all(op.asks_gradients for op in told.tasks["t"].ops)
    assert [op.gradients for op in told.tasks["t"].ops] == [op.gradients for op in graph.tasks["t"].ops]
