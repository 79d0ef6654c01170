"""Train one step of a model in plain PyTorch and by its ops in uneven shares, and compare."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from model_fuzz.models import Recipe, workload
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec
from spindle_cli.workload.losses.shares import LossCounter, share_of_samples
from spindle_cli.workload.metaops.ops import op_module, share_module

_TOLERANCE = 1e-9  # relative to the largest entry; float64 rounds at 1e-16


@dataclass(frozen=True)
class Outcome:
    """`wrong`: largest relative difference where another model was trained. `whole`: ops that are not split,
    with the reason; `refused`: the message.
    """

    recipe: Recipe
    wrong: float | None = None
    whole: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def is_needless(self) -> bool:
        """Whether it is whole or refused although nothing in it couples samples."""
        return not self.recipe.couples and bool(self.whole or self.refused)


def compare(recipe: Recipe) -> Outcome:
    """Analyse a model, and compare what its ops give in 2, 3 and 4 shares with plain PyTorch."""
    made = workload(recipe)
    task = made.tasks[0]
    plain = copy.deepcopy(task.module)  # type: ignore[union-attr]
    try:
        graph = analyse(made)
    except WorkloadError as error:
        return Outcome(recipe, refused=str(error).split("\n")[0])
    traced = graph.tasks["t"]
    batch = {name: values[: recipe.batch_size] for name, values in task.dataset.fields.items()}
    expected = _state_after(plain, plain(**batch))
    worst = 0.0
    for shares in (2, 3, 4):
        module = copy.deepcopy(task.module)  # type: ignore[union-attr]
        moved = TaskGraph(traced.task, module, traced.ops, traced.values, traced.fields)
        loss = _run(moved, batch, shares, random.Random(recipe.number * 10 + shares))
        worst = max(worst, _difference(_state_after(module, loss), expected))
    reasons = tuple(f"{op.target}: {op.coupled_because}" for op in traced.ops if op.coupled)
    return Outcome(recipe, worst if worst > _TOLERANCE else None, reasons)


def _state_after(module: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The loss, every gradient, and every buffer."""
    for parameter in module.parameters():
        parameter.grad = None
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in module.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found | {name: buffer.detach().double() for name, buffer in module.named_buffers()}


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    scale = max(1.0, float(expected["loss"].abs()))
    return max(float((found[name] - value).abs().max()) for name, value in expected.items()) / scale


def _run(task: TaskGraph, batch: dict[str, Tensor], shares: int, draw: random.Random) -> Tensor:
    """The task's loss, op by op, every op that may be split cut at random places."""
    size = task.task.batch_size
    values: dict[str, Tensor] = {}
    for op in task.ops:
        inner = [] if op.coupled else sorted(draw.sample(range(1, size), shares - 1))
        cuts = list(pairwise([0, *inner, size]))
        if op.is_loss:
            return _loss(task, op, batch, values, cuts)
        module = op_module(task, op)
        results = [module(*_given(task, op, batch, values, cut)) for cut in cuts]
        for position, name in enumerate(op.outputs):
            parts = [result[position] for result in results]
            dim = task.values[name].batch_dim
            values[name] = parts[0] if dim is None else torch.cat(parts, dim)
    raise AssertionError("no op gives the loss")


def _loss(
    task: TaskGraph,
    op: Op,
    batch: dict[str, Tensor],
    values: dict[str, Tensor],
    cuts: Sequence[tuple[int, int]],
) -> Tensor:
    """Sum of what the shares of the loss add to it."""
    parts = [share_of_samples(last - first, task.task.batch_size, 1) for first, last in cuts]
    module = share_module(task, op)
    results = [
        module(*_given(task, op, batch, values, cut), *more) for cut, more in _counted(task, op, batch, cuts)
    ]
    if op.shares is None:
        results = [result * part for result, part in zip(results, parts, strict=True)]
    return torch.stack(results).sum()


def _counted(
    task: TaskGraph, op: Op, batch: dict[str, Tensor], cuts: Sequence[tuple[int, int]]
) -> list[tuple[tuple[int, int], tuple[float | Tensor, ...]]]:
    """For each share its part of the samples, and what all shares together count."""
    if op.shares is None:
        return [(cut, ()) for cut in cuts]
    parts = {cut: share_of_samples(cut[1] - cut[0], task.task.batch_size, 1) for cut in cuts}
    counts: list[Tensor] = []
    if op.shares.num_counts:
        counter = LossCounter(task.root, op.shares)
        each = [
            counter.count({name: batch[name][cut[0] : cut[1]] for name in counter.fields}, part)
            for cut, part in parts.items()
        ]
        counts = list(torch.stack(each).sum(0))
    return [(cut, (part, *counts)) for cut, part in parts.items()]


def _given(
    task: TaskGraph, op: Op, batch: dict[str, Tensor], values: dict[str, Tensor], cut: tuple[int, int]
) -> list[Tensor]:
    fields = [_rows(batch[name], task.fields[name], cut) for name in op.fields]
    return [*fields, *(_rows(values[name], task.values[name], cut) for name in op.inputs)]


def _rows(tensor: Tensor, spec: ValueSpec, cut: tuple[int, int]) -> Tensor:
    if spec.batch_dim is None:
        return tensor
    rows = spec.rows_per_sample
    return tensor.narrow(spec.batch_dim, cut[0] * rows, (cut[1] - cut[0]) * rows)
