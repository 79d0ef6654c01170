"""Run a task's ops by hand: each in shares of the batch, its values cut and joined as transfers would."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from model_fuzz.joint_norms import run_shares as run_jointly
from model_fuzz.joint_pairs import run_pairs
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.losses.counts import LossCounter, share_of_samples
from spindle_cli.training.batches import Batches
from spindle_cli.verify.flow import run_flow
from spindle_cli.workload.arguments import call_forward
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec
from spindle_cli.workload.types import Task, Workload


def run_plain(task, batch: dict[str, Tensor]) -> Tensor:
    loss = call_forward(task, batch) if isinstance(task, Task) else run_flow(task, batch)
    return loss["loss"] if isinstance(loss, dict) else loss


def rows(tensor: Tensor, spec: ValueSpec, first: int, last: int) -> Tensor:
    """The part of a value that belongs to samples [first, last); all of it without a batch dimension."""
    if spec.batch_dim is None:
        return tensor
    return tensor.narrow(spec.batch_dim, first * spec.rows_per_sample, (last - first) * spec.rows_per_sample)


def run_shares(task: TaskGraph, batch: dict[str, Tensor], dp: dict[int, int]) -> Tensor:
    """The task's loss, op by op, op k in dp[k] equal shares of the batch (a coupled op always in one)."""
    size = task.task.batch_size
    cuts = {op: [share * size // shares for share in range(shares + 1)] for op, shares in dp.items()}
    return run_cut(task, [batch], cuts)


def run_cut(task: TaskGraph, batches: list[dict[str, Tensor]], cuts: dict[int, list[int]]) -> Tensor:
    """The loss of a step's batches together, op k in shares that end at cuts[k] (a coupled op always in
    one).
    """
    size, loss = task.task.batch_size, task.ops[-1]
    offsets = {op.index: [0, size] if op.coupled else cuts.get(op.index, [0, size]) for op in task.ops}
    shares = list(itertools.pairwise(offsets[loss.index]))
    counts: list[Tensor] = []
    if loss.shares is not None and loss.shares.num_counts:
        counter = LossCounter(task.root, loss.shares)
        counts = list(
            sum(
                counter.count(
                    {name: batch[name][first:last] for name in counter.fields},
                    share_of_samples(last - first, size, len(batches)),
                )
                for batch in batches
                for first, last in shares
            )
        )
    return sum(_run_batch(task, batch, offsets, counts, len(batches)) for batch in batches)


def _run_batch(
    task: TaskGraph,
    batch: dict[str, Tensor],
    offsets: dict[int, list[int]],
    counts: list[Tensor],
    num_batches: int,
) -> Tensor:
    """What a batch adds to the step's loss."""
    values: dict[str, Tensor] = {}
    for op in task.ops:
        shares = list(itertools.pairwise(offsets[op.index]))
        module = task.share_module(op)
        parts = [share_of_samples(last - first, task.task.batch_size, num_batches) for first, last in shares]
        inputs = [share_inputs(task, op, batch, values, first, last) for first, last in shares]
        more = [() if op.shares is None else (part, *counts) for part in parts]
        given = [(*each, *told) for each, told in zip(inputs, more, strict=True)]
        if len(given) == 1:
            results = [module(*given[0])]
        elif op.contrasts:
            results = run_pairs(module, task, op, offsets[op.index], given)
        else:
            results = run_jointly(module, [partial(module, *each) for each in given])
        if op.is_loss:
            if op.shares is not None or task.task.reduction == "sum":
                return sum(results)
            return sum(result * part for result, part in zip(results, parts, strict=True))
        for position, name in enumerate(op.outputs):
            dim = task.values[name].batch_dim
            found = [result[position] for result in results]
            if dim is None:
                assert all(torch.equal(copy, found[0]) for copy in found), f"shares differ in {name}"
            values[name] = found[0] if dim is None else torch.cat(found, dim)
    raise AssertionError("no op gives the loss")


def assert_trains_as_plain(
    task: Task,
    graph: TaskGraph,
    batch: dict[str, Tensor],
    cut: list[int],
    *,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    """Shares that end at `cut` (of what is coupled, the whole batch) come to the loss and the gradients of
    forward.

    Args:
        graph: of another build of the task, or of this one.
    """
    plain = run_plain(task, batch)
    expected = gradients_of(plain, dict(task.module.named_parameters()))
    loss = run_cut(graph, [batch], {op.index: cut for op in graph.ops})
    torch.testing.assert_close(loss, plain, rtol=min(rtol, 1e-5), atol=min(atol, 1e-7))
    found = gradients_of(loss, dict(graph.root.named_parameters()))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=rtol, atol=atol, msg=lambda why, name=name: f"{name}: {why}"
        )


def assert_steps_as_plain(make: Callable[[], Workload], shares: int, steps: int = 3) -> None:
    """Ops in equal shares come to the losses and parameters of forward over several steps of SGD, which go on
    from each other.

    Args:
        make: builds the workload, of one task.
    """
    plain, mine = make(), make()
    graph = next(iter(analysed(mine).tasks.values()))
    cut = dict.fromkeys((op.index for op in graph.ops), shares)

    def trained(workload: Workload, loss_of: Callable[[dict[str, Tensor]], Tensor]) -> list[Tensor]:
        task = workload.tasks[0]
        optimizer = torch.optim.SGD(task.module.parameters(), lr=0.1)
        losses: list[Tensor] = []
        for step in range(steps):
            loss = loss_of(Batches(task, seed=1).rows(step, 0, task.batch_size))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *task.module.state_dict().values()]

    expected = trained(plain, lambda batch: run_plain(plain.tasks[0], batch))
    found = trained(mine, lambda batch: run_shares(graph, batch, cut))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def share_inputs(
    task: TaskGraph, op: Op, batch: dict[str, Tensor], values: dict[str, Tensor], first: int, last: int
) -> list[Tensor]:
    fields = [rows(batch[name], task.fields[name], first, last) for name in op.fields]
    return [*fields, *(rows(values[name], task.values[name], first, last) for name in op.inputs)]


def gradients_of(loss: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor | None]:
    for parameter in parameters.values():
        parameter.grad = None
    loss.backward()
    return {name: parameter.grad for name, parameter in parameters.items()}
