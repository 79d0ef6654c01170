"""Copies of parameters that forward makes, and calls of modules with other parameters than their own, are of
every step: a trace would have those that it was made with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Task, Workload

from .shares import assert_steps_as_plain
from .toy import WIDTH, Block, Items


class Net(nn.Module):
    """Two blocks that are operators, and a head between them and the loss; `run` is its forward."""

    def __init__(self, run: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(WIDTH, WIDTH)
        self.start = {name: value.detach() + 0.1 for name, value in self.second.named_parameters()}
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)

    def layers(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(x)))
        return out


def copied_operator(net: Net, x: Tensor) -> Tensor:
    twin = copy.deepcopy(net.second)
    with torch.no_grad():
        target = twin(x)
    return functional.mse_loss(net.layers(x), target)


def copied_head(net: Net, x: Tensor) -> Tensor:
    y = net.layers(x)
    twin = copy.deepcopy(net.head).requires_grad_(False)
    return functional.mse_loss(y, twin(x))


def copied_parameter(net: Net, x: Tensor) -> Tensor:
    weight = copy.deepcopy(net.head.weight)
    return functional.mse_loss(net.layers(x), functional.linear(x, weight).detach())


def copied_by_state(net: Net, x: Tensor) -> Tensor:
    y = net.layers(x).square().mean()
    scale = net.second.state_dict()["linear.weight"].abs().mean()
    return y * (1 + scale)


def copied_and_kept_apart(net: Net, x: Tensor) -> Tensor:
    before = [parameter.detach().clone() for parameter in net.second.parameters()]
    y = net.layers(x).square().mean()
    return y * (1 + before[0].abs().sum())


def called_with_its_state(net: Net, x: Tensor) -> Tensor:
    y = net.layers(x)
    with torch.no_grad():
        target = functional_call(net.second, net.second.state_dict(), (x,))
    return functional.mse_loss(y, target)


def called_with_others(net: Net, x: Tensor) -> Tensor:
    return functional_call(net.first, dict(net.second.named_parameters()), (x,)).square().mean()


def called_with_scaled(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    scaled = {name: value * 0.5 for name, value in net.second.named_parameters()}
    return (functional_call(net.second, scaled, (y,)) + net.second(y)).square().mean()


def called_with_first_ones(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = functional_call(net.second, net.start, (x,))
    return functional.mse_loss(net.layers(x), target)


def penalty(net: Net, x: Tensor) -> Tensor:
    loss = net.layers(x).square().mean()
    penalties = [parameter.square().sum() for name, parameter in net.named_parameters() if "bias" in name]
    return loss + 0.1 * torch.stack(penalties).sum()


def penalty_around(net: Net, x: Tensor) -> Tensor:
    loss = net.layers(x).square().mean()
    for name, parameter in net.second.named_parameters():
        loss = loss + (parameter - net.start[name]).square().sum()
    return loss


RUNS = [
    copied_operator,
    copied_head,
    copied_parameter,
    copied_by_state,
    copied_and_kept_apart,
    called_with_its_state,
    called_with_others,
    called_with_scaled,
    called_with_first_ones,
    penalty,
    penalty_around,
]


def workload(run: Callable[[Net, Tensor], Tensor]) -> Workload:
    torch.manual_seed(3)
    return Workload("w", [Task("t", Net(run), 6, Items(x=(WIDTH,)))], (Block,))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("shares", [1, 2])
def test_they_are_of_every_step(run: Callable[[Net, Tensor], Tensor], shares: int) -> None:
    assert_steps_as_plain(lambda: workload(run), shares)


def shape_alone(net: Net, x: Tensor) -> Tensor:
    like = next(net.parameters())
    return net.layers(x + like.new_zeros(WIDTH) + torch.ones(WIDTH, dtype=like.dtype)).square().mean()


def detached(net: Net, x: Tensor) -> Tensor:
    return functional.mse_loss(net.layers(x), functional.linear(x, net.head.weight.detach().clone()))


@pytest.mark.parametrize("run", [shape_alone, detached])
def test_nothing_is_whole_for_what_a_trace_follows(run: Callable[[Net, Tensor], Tensor]) -> None:
    made = workload(run)
    assert not any(op.coupled for op in analysed(made).tasks["t"].ops)
    assert_steps_as_plain(lambda: workload(run), 2)


NO_SOURCE: dict[str, Any] = {}
exec(  # code whose statements nobody can look at
    """def forward(self, x):
    return self.layers(x).mean() * self.second.state_dict()["linear.weight"].sum()""",
    NO_SOURCE,
)


def test_where_no_statements_are_known_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "forward", NO_SOURCE["forward"])
    with pytest.raises(WorkloadError, match="with a copy of the values of 'second") as refused:
        analysed(workload(detached))
    assert "`operators`" in str(refused.value.hint)


class Copying(nn.Module):
    """What the refusal advises."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        twin = copy.deepcopy(self.block)
        halved = {name: value * 0.5 for name, value in self.block.named_parameters()}
        out: Tensor = self.block(x) - functional_call(twin, halved, (x,)).detach()
        return out * self.block.state_dict()["linear.weight"].abs().mean()


def test_an_operator_may_do_it() -> None:
    def made() -> Workload:
        workload_ = workload(lambda net, x: net.second(x).square().mean())
        workload_.tasks[0].module.second = Copying()  # type: ignore[union-attr]
        return Workload("w", workload_.tasks, (Copying,))

    assert_steps_as_plain(made, 2)
