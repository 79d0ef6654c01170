"""Run a task's ops by hand: each in shares of the batch, its values cut and joined as transfers would."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spindle_cli.verify.flow import run_flow
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec
from spindle_cli.workload.metaops.ops import op_module
from spindle_cli.workload.types import Task


def run_plain(task, batch: dict[str, Tensor]) -> Tensor:
    loss = task.module(**batch) if isinstance(task, Task) else run_flow(task, batch)
    return loss["loss"] if isinstance(loss, dict) else loss


def rows(tensor: Tensor, spec: ValueSpec, first: int, last: int) -> Tensor:
    """The part of a value that belongs to samples [first, last); all of it without a batch dimension."""
    if spec.batch_dim is None:
        return tensor
    return tensor.narrow(spec.batch_dim, first * spec.rows_per_sample, (last - first) * spec.rows_per_sample)


def run_shares(task: TaskGraph, batch: dict[str, Tensor], dp: dict[int, int]) -> Tensor:
    """The task's loss, op by op, op k in dp[k] shares of the batch (a coupled op always in one)."""
    values: dict[str, Tensor] = {}
    size = task.task.batch_size
    for op in task.ops:
        shares = 1 if op.coupled else dp.get(op.index, 1)
        module = op_module(task, op)
        results = [
            run_share(task, op, module, batch, values, share * size // shares, (share + 1) * size // shares)
            for share in range(shares)
        ]
        if op.is_loss:
            weight = 1.0 if task.task.reduction == "sum" else 1 / shares
            return sum(result * weight for result in results)
        for position, name in enumerate(op.outputs):
            dim = task.values[name].batch_dim
            assert dim is not None or shares == 1, f"{name} has no batch dimension, but its op is split"
            parts = [result[position] for result in results]
            values[name] = parts[0] if dim is None else torch.cat(parts, dim)
    raise AssertionError("no op gives the loss")


def run_share(
    task: TaskGraph,
    op: Op,
    module: nn.Module,
    batch: dict[str, Tensor],
    values: dict[str, Tensor],
    first: int,
    last: int,
):
    fields = [rows(batch[name], task.fields[name], first, last) for name in op.fields]
    inputs = [rows(values[name], task.values[name], first, last) for name in op.inputs]
    return module(*fields, *inputs)


def gradients_of(loss: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor | None]:
    for parameter in parameters.values():
        parameter.grad = None
    loss.backward()
    return {name: parameter.grad for name, parameter in parameters.items()}
