"""Operators that ask for gradients find them in evaluations too, in a run and in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from gradient_toys import BATCH, WIDTH, build_asking
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.runtime.evaluating.passes import _run_op
from spindle_cli.verify.evaluated import _run
from spindle_cli.workload.graph import Op, TaskGraph
from spindle_cli.workload.types import Task


def _evaluated(task: TaskGraph, batch: dict[str, Tensor]) -> list[tuple[Op, Tensor]]:
    """What each op gives, one after another, without gradients."""
    known, found = dict(batch), []
    with torch.no_grad():
        for op in task.ops:
            taken = [known[name] for name in (*op.fields, *op.inputs)]
            (result,) = _run_op(task, op, task.op_module(op), taken, [])
            found.append((op, result))
            known.update(dict.fromkeys(op.outputs, result))
    return found


def test_a_run_evaluates_what_asks_for_gradients_as_it_is_trained() -> None:
    graph = analysed(build_asking())
    task = graph.tasks["ask"]
    batch = {name: torch.randn(BATCH, WIDTH) for name in ("x", "y")}
    found = _evaluated(task, batch)
    assert [op.asks_gradients for op, _ in found] == [True, True, True, True, False]
    assert not any(result.requires_grad for _, result in found)
    expected = task.root(**batch)
    torch.testing.assert_close(found[-1][1], expected.detach())
    assert all(parameter.grad is None for parameter in task.root.parameters())


def test_so_does_plain_pytorch_for_verify() -> None:
    workload = build_asking()
    batch = {name: torch.randn(BATCH, WIDTH) for name in ("x", "y")}
    expected = workload.tasks[0].module(**batch).detach()
    with torch.no_grad():
        torch.testing.assert_close(_run(workload.tasks[0], batch).detach(), expected)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("of its own")


class Split(nn.Module):
    """Fails with or without gradients, after it has asked for some."""

    def forward(self, x: Tensor) -> Tensor:
        torch.autograd.grad(x.sum(), torch.ones(1))
        return x


@pytest.mark.parametrize(
    ("module", "message"), [(Failing(), "of its own"), (Split(), "does not require grad")]
)
def test_other_failures_are_told(module: nn.Module, message: str) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        _run(Task("t", module, 2, [{"x": torch.ones(1)}] * 2), {"x": torch.ones(2, 1)})
