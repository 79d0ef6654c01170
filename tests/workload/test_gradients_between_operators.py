"""Gradients that forward asks for between operators: statements run whole, with all that is differentiated
in them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad as gradients

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.training.batches import Batches
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Task, Workload

from .shares import gradients_of, run_cut, run_plain
from .toy import WIDTH, Block, Items

BATCH = 6


class Net(nn.Module):
    def __init__(self, run: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.run, self.ask = run, torch.autograd.grad
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.a, self.b, self.c = Block(), Block(), Block()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.run(self, x, y)


def physics(self: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    u = self.head(self.b(self.a(x)))
    (slope,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    return (bend[:, :1] + u).square().mean() + (self.c(y) * slope).mean()


def of_a_field(self: Net, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_()
    energy = self.head(self.a(x)).sum()
    force = -torch.autograd.grad(energy, x, create_graph=True)[0]
    return (force - y).square().mean()


def of_a_field_by_its_mark(self: Net, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad = True
    h = self.c(y)
    energy = self.head(self.a(x)).sum()
    force = -torch.autograd.grad(energy, x, create_graph=True)[0]
    return (force - h).square().mean()


def derivative(of: Tensor, by: Tensor) -> Tensor:
    return torch.autograd.grad(of, by, torch.ones_like(of), create_graph=True)[0]


def by_a_helper(self: Net, x: Tensor, y: Tensor) -> Tensor:
    h = self.a(y)
    x = x.detach().requires_grad_()
    slope = derivative(self.head(self.b(x)), x)
    return (slope * h).mean()


def penalty(self: Net, x: Tensor, y: Tensor) -> Tensor:
    made = self.a(x)
    mixed = (0.3 * y + 0.7 * made).detach().requires_grad_(True)
    slope = derivative(self.head(self.c(self.b(mixed))), mixed)
    scores = self.head(self.c(self.b(made))) - self.head(self.c(self.b(y)))
    return scores.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def inner_step(self: Net, x: Tensor, y: Tensor) -> Tensor:
    h = self.a(x)
    weights = dict(self.first.named_parameters())
    loss = (torch.func.functional_call(self.first, weights, (h.detach(),)) - y).square().mean()
    slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    faster = {name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
    return (torch.func.functional_call(self.first, faster, (h,)) - y).square().mean()


def balanced(self: Net, x: Tensor, y: Tensor) -> Tensor:
    h = self.b(self.a(x))
    one, two = (self.head(h) - y).square().mean(), self.first(h).abs().mean()
    slopes = [torch.autograd.grad(loss, h, create_graph=True)[0].norm() for loss in (one, two)]
    return one + two + (slopes[0] - slopes[1]).abs()


def by_two_ways(self: Net, x: Tensor, y: Tensor) -> Tensor:
    """What is differentiated comes by a layer, and past it."""
    h = self.a(x)
    past = h.square().sum(1, keepdim=True)
    u = self.head(self.b(h)) * past
    (slope,) = torch.autograd.grad(u.sum(), h, create_graph=True)
    return (slope * y).square().mean() + u.mean()


def of_weights_used_before(self: Net, x: Tensor, y: Tensor) -> Tensor:
    """The weight has a part in what it is multiplied with."""
    h = self.a(self.first(x))
    loss = (h @ self.first.weight - y).square().mean()
    (slope,) = torch.autograd.grad(loss, self.first.weight, create_graph=True)
    return loss + slope.square().sum()


def by_another_name(self: Net, x: Tensor, y: Tensor) -> Tensor:
    """The same, of a weight used before, by a name of the user's own."""
    h = self.a(self.first(x))
    loss = (h @ self.first.weight - y).square().mean()
    (slope,) = gradients(loss, self.first.weight, create_graph=True)
    return loss + slope.square().sum()


with_a_graph = functools.partial(torch.autograd.grad, create_graph=True)


def by_two_ways_and_a_partial(self: Net, x: Tensor, y: Tensor) -> Tensor:
    h = self.a(x)
    past = h.square().sum(1, keepdim=True)
    (slope,) = with_a_graph((self.head(self.b(h)) * past).sum(), h, allow_unused=True)
    return (slope * y).square().mean() + past.mean()


def by_an_attribute(self: Net, x: Tensor, y: Tensor) -> Tensor:
    h = self.a(x)
    past = h.square().sum(1, keepdim=True)
    (slope,) = self.ask((self.head(self.b(h)) * past).sum(), h, create_graph=True)
    return (slope * y).square().mean() + past.mean()


def where_samples_ask_for_it(self: Net, x: Tensor, y: Tensor) -> Tensor:
    """No sample that it is traced with does."""
    h = self.a(self.first(x))
    loss = (h @ self.first.weight - y).square().mean()
    if loss > 1e6:
        (slope,) = gradients(loss, self.first.weight, create_graph=True)
        loss = loss + slope.square().sum()
    return loss


# With the operators that are not run inside of the statements.
WAYS: dict[Callable[[Net, Tensor, Tensor], Tensor], list[str]] = {
    physics: ["c"],
    of_a_field: [],
    of_a_field_by_its_mark: [],
    by_a_helper: ["a"],
    penalty: ["a", "b", "c", "b", "c"],
    inner_step: ["a"],
    balanced: ["a", "b"],
    by_two_ways: ["a"],
    of_weights_used_before: [],
    by_another_name: [],
    by_two_ways_and_a_partial: ["a"],
    by_an_attribute: ["a"],
}


def graph_of(task: Task) -> TaskGraph:
    return analysed(Workload("w", [task], (Block,))).tasks["t"]


@pytest.mark.parametrize("run", WAYS, ids=lambda run: run.__name__)
def test_they_are_those_of_plain_pytorch(run: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    task = Task("t", Net(run), BATCH, Items(x=(WIDTH,), y=(WIDTH,)))
    graph = graph_of(task)
    assert [op.target for op in graph.ops if op.target is not None] == WAYS[run]
    assert any(op.asks_gradients for op in graph.ops)
    batches = [Batches(task, seed=1).rows(0, 0, BATCH) for _ in range(2)]
    plain = run_plain(task, batches[0])  # which may leave the mark of a gradient on its fields
    cuts = {op.index: [0, 1, 4, BATCH] for op in graph.ops}
    loss = run_cut(graph, [batches[1]], cuts)
    assert not any(field.requires_grad for field in batches[1].values())
    torch.testing.assert_close(loss, plain)
    parameters = dict(task.module.named_parameters())
    assert all(parameter.grad is None for parameter in parameters.values())
    expected, gradients = gradients_of(plain, parameters), gradients_of(loss, parameters)
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-5)


def test_what_others_take_too_is_not_marked_for_a_gradient() -> None:
    """Statements that mark a tensor without one mark one of their own, over the same memory."""
    task = Task("t", Net(of_a_field), BATCH, Items(x=(WIDTH,), y=(WIDTH,)))
    (op,) = (graph := graph_of(task)).ops
    batch = Batches(task, seed=1).rows(0, 0, BATCH)
    graph.share_module(op)(*(batch[name] for name in op.fields), 1.0)
    assert not any(field.requires_grad for field in batch.values())


def test_what_samples_may_ask_for_is_taken_to_be_asked() -> None:
    """A branch that was not taken may be, so that the weight's other use must not lie before it."""
    task = Task("t", Net(where_samples_ask_for_it), BATCH, Items(x=(WIDTH,), y=(WIDTH,)))
    assert [op.target for op in graph_of(task).ops] == [None]


def test_where_the_statements_cannot_be_taken_apart_it_is_refused() -> None:
    run: Callable[[Net, Tensor, Tensor], Tensor] = lambda self, x, y: derivative(self.b(self.a(x)), x).mean()  # noqa: E731
    task = Task("t", Net(run), BATCH, Items(x=(WIDTH,), y=(WIDTH,)))
    with pytest.raises(
        WorkloadError, match=r"operators\.py:\d+: task 't': forward asks for gradients between"
    ):
        graph_of(task)
