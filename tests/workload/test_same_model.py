"""Running a workload's ops one after another is running its plain modules: same loss, same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.batches import Batches
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.ops import op_module
from spindle_cli.workload.types import Workload

from . import toy


def run_ops(task: TaskGraph, batch: dict[str, Tensor]) -> Tensor:
    """The task's loss, op by op, with every value between ops cut off from its producer as a transfer would."""
    values: dict[str, Tensor] = {}
    for op in task.ops:
        result = op_module(task, op)(*(batch[f] for f in op.fields), *(values[v] for v in op.inputs))
        if op.is_loss:
            return result
        values.update(zip(op.outputs, result, strict=True))
    raise AssertionError("no op gives the loss")


def gradients(workload: Workload) -> list[Tensor | None]:
    found = {id(p): p.grad for task in workload.tasks for p in task.module.parameters()}
    return list(found.values())


@pytest.mark.parametrize("build", [toy.two_tasks])
def test_ops_in_order_give_the_plain_loss_and_gradients(build) -> None:
    workload = build()
    graph = analyse(workload)
    for task in workload.tasks:
        batch = Batches(task, seed=1).rows(0, 0, task.batch_size)
        plain = task.module(**batch)
        plain = plain["loss"] if isinstance(plain, dict) else plain
        (plain * task.weight).backward()
        expected = gradients(workload)
        for p in task.module.parameters():
            p.grad = None
        loss = run_ops(graph.tasks[task.name], batch)
        (loss * task.weight).backward()
        assert torch.equal(loss, plain)
        for found, wanted in zip(gradients(workload), expected, strict=True):
            assert (found is None) == (wanted is None)
            assert found is None or torch.equal(found, wanted)
        for p in task.module.parameters():
            p.grad = None
