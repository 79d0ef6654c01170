"""Which batch norms let their op be split, and which still couple its samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.graph import Op
from spindle_cli.workload.types import Task, Workload

WIDTH, TOKENS, BATCH = 4, 3, 6


class Mine(nn.BatchNorm1d):
    """What a class of the user's own does is not known."""


class Layer(nn.Module):
    def __init__(self, norm: nn.Module, apply: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm, self.apply = nn.Linear(WIDTH, WIDTH), norm, apply

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.apply(self.norm, x))


class Net(nn.Module):
    def __init__(self, first: nn.Module, then: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.second, self.then = first, nn.Linear(WIDTH, WIDTH), then

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.then(self.first(x))).square().mean()


def ops_of(net: nn.Module, *operators: type[nn.Module], coupled: tuple[type, ...] = ()) -> tuple[Op, ...]:
    items = [{"x": torch.randn(TOKENS, WIDTH)} for _ in range(12)]
    task = Task("t", net, BATCH, items)
    return analysed(Workload("w", [task], operators=operators, coupled=coupled)).tasks["t"].ops


def first_op(norm: nn.Module, apply: Callable[[nn.Module, Tensor], Tensor]) -> Op:
    return ops_of(Net(Layer(norm, apply)), Layer, nn.Linear)[0]


def last_dim(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("norm", "apply"),
    [
        (nn.BatchNorm1d(WIDTH), last_dim),
        (nn.BatchNorm1d(TOKENS, momentum=None), lambda norm, x: norm(x)),
        (nn.SyncBatchNorm(WIDTH), last_dim),
        (nn.BatchNorm1d(WIDTH, track_running_stats=False).eval(), last_dim),
        (nn.BatchNorm1d(WIDTH, affine=False), lambda norm, x: norm(x.flatten(0, 1)).view(x.shape)),
        (nn.BatchNorm1d(WIDTH), lambda norm, x: norm(x.permute(1, 2, 0)).permute(2, 0, 1)),
        (nn.BatchNorm2d(1), lambda norm, x: norm(x[:, None])[:, 0]),
    ],
    ids=["1d", "no momentum", "sync", "no statistics", "rows", "batch last", "2d"],
)
def test_an_op_that_couples_samples_by_batch_norm_alone_is_split(norm: nn.Module, apply: object) -> None:
    op = first_op(norm, apply)  # type: ignore[arg-type]
    assert (op.coupled, op.coupled_because, op.batch_norms) == (False, None, ("first.norm",))


@pytest.mark.parametrize(
    ("norm", "apply", "why"),
    [
        (Mine(WIDTH), last_dim, "normalises over the batch"),
        (nn.BatchNorm1d(WIDTH), lambda norm, x: last_dim(norm, x) - x.mean(0), "samples one by one"),
        (nn.BatchNorm1d(BATCH), lambda norm, x: norm(x.transpose(0, 1)).transpose(0, 1), "one by one"),
        (
            nn.BatchNorm1d(WIDTH),
            lambda norm, x: x + norm(torch.ones(5, WIDTH)).sum(),
            "takes what is no row for each sample",
        ),
        (nn.BatchNorm1d(WIDTH), lambda norm, x: last_dim(norm, x) + norm(x.mean(0)).sum(), "one by one"),
        (
            nn.BatchNorm1d(WIDTH),
            lambda norm, x: functional.batch_norm(x.flatten(0, 1), None, None, training=True).view(x.shape),
            "one by one",
        ),
    ],
    ids=["own class", "another coupling", "batch as channels", "of a constant", "of a mean", "functional"],
)
def test_everything_else_that_couples_stays_whole(norm: nn.Module, apply: object, why: str) -> None:
    try:
        op = first_op(norm, apply)  # type: ignore[arg-type]
    except WorkloadError:
        assert isinstance(norm, nn.BatchNorm1d) and norm.num_features == BATCH, "it takes no other batch"
        return
    assert op.coupled and why in str(op.coupled_because)
    assert op.batch_norms == ()


def test_a_frozen_batch_norm_couples_nothing_and_sums_nothing() -> None:
    op = first_op(nn.BatchNorm1d(WIDTH).eval(), last_dim)
    assert (op.coupled, op.batch_norms) == (False, ())


def test_a_listed_operator_stays_whole() -> None:
    ops = ops_of(Net(Layer(nn.BatchNorm1d(WIDTH), last_dim)), nn.Linear, coupled=(Layer,))
    assert ops[0].coupled and ops[0].batch_norms == ()


class Glued(nn.Module):
    """Norms before, between and behind two operators; what the first gives goes to both."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.after = (nn.BatchNorm1d(TOKENS) for _ in range(3))
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y = self.between(self.one(x))
        return self.after(self.two(x + y)).pow(4).mean()


def test_a_batch_norm_between_operators_belongs_to_one_op_and_runs_there_alone() -> None:
    ops = ops_of(Glued(), nn.Linear)
    assert [op.batch_norms for op in ops] == [("before", "between"), ("after",)]
    assert [op.coupled for op in ops] == [False, False]
    calls = [str(node.target) for op in ops for node in op.graph.nodes if node.op == "call_module"]
    assert sorted(calls) == ["after", "before", "between", "one", "two"]


def test_a_module_that_is_called_twice_is_named_once() -> None:
    op = first_op(nn.BatchNorm1d(WIDTH), lambda norm, x: last_dim(norm, last_dim(norm, x) * 2))
    assert op.batch_norms == ("first.norm",)


def test_analysing_changes_no_statistics() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    first_op(norm, last_dim)
    assert all(torch.equal(before[name], buffer) for name, buffer in norm.named_buffers())
    assert "forward" not in norm.__dict__
