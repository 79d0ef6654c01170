"""A torch.autograd.Function keeps its backward, inside of an operator and between operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Items


class Reversed(torch.autograd.Function):
    """Gives what it takes, and the negative of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


class Reverse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Adversary(nn.Module):
    """A domain's head behind a reversed gradient."""

    def __init__(self, reverse: nn.Module) -> None:
        super().__init__()
        self.block, self.reverse, self.head = Block(), reverse, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.reverse(self.block(x))).pow(2).mean()  # type: ignore[no-any-return]


def workload(*operators: type[nn.Module]) -> Workload:
    torch.manual_seed(0)
    return Workload("w", [Task("t", Adversary(Reverse()), 4, Items(x=(4, WIDTH)))], operators)


class Hidden(Adversary):
    """Statements that nobody can take apart."""

    forward = lambda self, x: Reversed.apply(self.block(x)).mean()  # noqa: E731


def test_where_its_statements_cannot_be_taken_apart_it_is_refused_with_its_name_and_place() -> None:
    made = Workload("w", [Task("t", Hidden(Reverse()), 4, Items(x=(4, WIDTH)))], (Block,))
    with pytest.raises(WorkloadError, match=r"test_own_gradients\.py:\d+: task 't': forward calls Reversed"):
        analysed(made)


class Checkpointed(nn.Module):
    """Recomputes its layers, by either way that torch has."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.is_reentrant = nn.Sequential(Block(), Block()), is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.blocks, x.requires_grad_(), use_reentrant=self.is_reentrant)
        return made.pow(2).mean()


def test_the_way_out_for_layers_that_are_recomputed_between_operators_is_taken() -> None:
    def recomputing(*, is_reentrant: bool) -> Workload:
        task = Task("t", Checkpointed(is_reentrant=is_reentrant), 4, Items(x=(4, WIDTH)))
        return Workload("w", [task], (Block,))

    with pytest.raises(WorkloadError, match="forward calls CheckpointFunction") as caught:
        analysed(recomputing(is_reentrant=True))
    assert "use_reentrant=False" in str(caught.value.hint)
    task = analysed(recomputing(is_reentrant=False)).tasks["t"]
    assert [op.target for op in task.ops] == ["blocks.0", "blocks.1"]


def test_after_a_refusal_functions_are_called_as_before() -> None:
    task = Task("t", Checkpointed(is_reentrant=True), 4, Items(x=(4, WIDTH)))
    with pytest.raises(WorkloadError):
        analysed(Workload("w", [task], (Block,)))
    x = torch.ones(3, requires_grad=True)
    Reverse()(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize("operators", [(Block, Reverse), (Block,)], ids=["inside", "between"])
def test_it_keeps_its_backward(operators: tuple[type[nn.Module], ...]) -> None:
    made = workload(*operators)
    task = analysed(made).tasks["t"]
    x = torch.randn(4, 4, WIDTH)
    known = {"x": x}
    for op in task.ops[:-1]:
        given = task.op_module(op)(*(known[name] for name in (*op.fields, *op.inputs)))
        known.update(zip(op.outputs, given, strict=True))
    last = task.ops[-1]
    loss = task.op_module(last)(*(known[name] for name in (*last.fields, *last.inputs)))
    parameters = list(task.root.parameters())
    plain = made.tasks[0].module(x=x)
    for one, other in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(plain, parameters), strict=True
    ):
        torch.testing.assert_close(one, other)
