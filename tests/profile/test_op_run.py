"""Running one op, and what it keeps."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spindle_cli.profile.op.op_run import OpRun, TurnsClock, WallClock
from spindle_cli.profile.op.timings import Limits

FLOAT = 4


def test_kept_are_saved_values_and_outputs_but_neither_parameters_nor_inputs_of_other_ops() -> None:
    module = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    run = OpRun(module, [torch.randn(4, 8, requires_grad=True)], num_fields=0, clock=WallClock())
    # GELU keeps its input, the second layer keeps GELU's output, and the op's own output is kept too.
    assert run.kept_bytes() == 4 * (32 + 32 + 8) * FLOAT


def test_a_field_of_the_batch_is_kept_by_the_op_that_reads_it() -> None:
    run = OpRun(nn.Linear(8, 2), [torch.randn(4, 8)], num_fields=1, clock=WallClock())
    assert run.kept_bytes() == 4 * (8 + 2) * FLOAT


def test_a_value_saved_twice_or_as_a_view_is_counted_once() -> None:
    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            doubled = x * 2
            halves = doubled.chunk(2, dim=1)
            return halves[0] * halves[1]

    run = OpRun(Squares(), [torch.randn(4, 8, requires_grad=True)], num_fields=0, clock=WallClock())
    assert run.kept_bytes() == 4 * (8 + 4) * FLOAT


@pytest.mark.parametrize(("trained", "passes"), [(False, 0), (True, 3)])
def test_frozen_ops_have_no_backward_pass(trained: bool, passes: int) -> None:
    class Counted(torch.autograd.Function):
        backward_passes = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            Counted.backward_passes += 1
            return gradient

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8), requires_grad=trained)

        def forward(self, x: Tensor) -> Tensor:
            return Counted.apply(self.scale * x)

    run = OpRun(Scale(), [torch.randn(4, 8)], num_fields=0, clock=WallClock())
    before = Counted.backward_passes
    sample = run.repeat(3)
    assert sample.forward_s > 0
    assert Counted.backward_passes - before == passes


def test_runs_add_to_gradients_that_are_there_and_leave_none_at_the_inputs() -> None:
    module = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    run = OpRun(module, [x], num_fields=0, clock=WallClock())
    gradient = module.weight.grad
    assert run.warm_up(Limits(max_s=0.01)) > 0
    assert x.grad is None
    assert module.weight.grad is gradient and gradient is not None and gradient.any()


def test_an_op_with_several_outputs_runs_backward_through_those_that_need_it() -> None:
    class Split(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x.detach() > 0

    assert (
        OpRun(Split(), [torch.randn(4, 8, requires_grad=True)], num_fields=0, clock=WallClock())
        .repeat(1)
        .backward_s
        > 0
    )


def test_processor_time_counts_every_process_that_takes_turns_on_a_core() -> None:
    assert TurnsClock(2.0).between_s(1.0, 1.5) == 1.0
    assert TurnsClock(0.5).between_s(1.0, 1.5) == 0.5
    clock = TurnsClock(1.0)
    before = clock.mark()
    time.sleep(0.05)
    assert clock.between_s(before, clock.mark()) < 0.04


def test_copies_touch_as_much_as_asked_but_are_no_more_than_the_most() -> None:
    calls: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(id(self))
            return super().forward(x)

    def modules_run(num_bytes: int, most: int) -> int:
        x = torch.randn(4, 8, requires_grad=True)
        run = OpRun(Counted(8, 8, bias=False), [x], num_fields=0, clock=WallClock())
        run.spread(num_bytes, most)
        calls.clear()
        assert run.repeat(1).total_s > 0
        return len(set(calls))

    # One touches its weight with the gradient (2 x 64 numbers) and keeps its output (32).
    own_bytes = (2 * 64 + 32) * FLOAT
    assert modules_run(3 * own_bytes, most=16) == 3
    assert modules_run(1000 * own_bytes, most=5) == 5
    assert modules_run(1, most=5) == 1


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_an_op_that_keeps_what_it_has_computed_of_parameters_runs_over_copies() -> None:
    layer = torch.nn.utils.weight_norm(nn.Linear(8, 8))  # type: ignore[no-untyped-call]
    run = OpRun(layer, [torch.randn(4, 8, requires_grad=True)], num_fields=0, clock=WallClock())
    run.repeat(1)  # its `weight` is now no leaf
    run.spread(2**20, 3)
    assert run.repeat(3).total_s > 0
