"""Train one step of a model in plain PyTorch and by its ops in uneven shares, and compare."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from model_fuzz.joint_norms import run_shares
from model_fuzz.joint_pairs import run_pairs
from model_fuzz.models import Drawn, Recipe, workload
from spindle_cli.analysis.analyse import analyse
from spindle_cli.analysis.losses.counts import LossCounter, share_of_samples
from spindle_cli.errors import WorkloadError
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec, WorkloadGraph
from spindle_cli.workload.types import Task, Workload

Cuts = Sequence[tuple[int, int]]
_TOLERANCE = 1e-9  # relative to the largest entry; float64 rounds at 1e-16


@dataclass(frozen=True)
class Outcome:
    """`wrong`: largest relative difference where another model was trained. `whole`: ops that are not split,
    with the reason; `refused`: the message. `misjudged`: why `profile`'s check calls it wrong.
    """

    recipe: Recipe
    wrong: float | None = None
    whole: tuple[str, ...] = ()
    refused: str | None = None
    misjudged: str | None = None

    @property
    def is_needless(self) -> bool:
        """Whether it is whole or refused although nothing in it couples samples."""
        return not self.recipe.couples and bool(self.whole or self.refused)


def compare(
    recipe: Recipe,
    *,
    with_check: bool = False,
    analysed: Callable[[Workload], WorkloadGraph] = analyse,
) -> Outcome:
    """Analyse a model, and compare what its ops give in 1 to 4 shares with plain PyTorch.

    Args:
        with_check: also let `profile`'s check by numbers judge it, which must see no difference either.
        analysed: analyses it.
    """
    made = workload(recipe)
    task = made.tasks[0]
    assert isinstance(task, Task)
    plain = copy.deepcopy(task.module)
    try:
        graph = analysed(made)
    except WorkloadError as error:
        return Outcome(recipe, refused=str(error).split("\n")[0])
    traced = graph.tasks["t"]
    reasons = tuple(f"{op.target}: {op.coupled_because}" for op in traced.ops if op.coupled)
    # What is whole is a mean of the batches' losses, which is another thing than the loss of them all; so is
    # what normalises each batch, or compares its samples, by itself.
    is_by_batch = any(op.coupled or op.batch_norms or op.contrasts for op in traced.ops)
    count = 1 if is_by_batch else recipe.batches
    batches = [_samples(task.dataset, recipe.batch_size, number) for number in range(count)]
    if _labels_are_ignored_inside(traced, batches):
        return Outcome(recipe, refused="labels that its operator's mean ignores", whole=reasons)
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    expected = _state_after(plain, plain(**joined))
    worst = 0.0
    for shares in (1, 2, 3, 4):
        module = copy.deepcopy(task.module)
        moved = TaskGraph(traced.task, module, traced.ops, traced.values, traced.fields)
        loss = _run(moved, batches, shares, random.Random(recipe.number * 10 + shares))
        worst = max(worst, _difference(_state_after(module, loss, count), expected))
    wrong = worst if worst > _TOLERANCE else None
    misjudged = _misjudged(graph) if with_check and wrong is None else None
    return Outcome(recipe, wrong, reasons, misjudged=misjudged)


def _samples(dataset: Drawn, size: int, number: int) -> dict[str, Tensor]:
    return {name: values[number * size : (number + 1) * size] for name, values in dataset.fields.items()}


def _labels_are_ignored_inside(task: TaskGraph, batches: Sequence[dict[str, Tensor]]) -> bool:
    """Whether the runtime would end, as a mean inside an operator leaves labels out."""
    shares = task.ops[-1].shares
    if shares is None or task.ops[-1].coupled:
        return False
    return any(bool((batch[name] == -100).any()) for batch in batches for name in shares.all_must_count)


def _misjudged(graph: WorkloadGraph) -> str | None:
    try:
        (found,) = check_numbers(graph, 0, CheckSettings()).tasks
    except WorkloadError as error:
        return str(error)
    return next(iter(found.whole.values()), None)


def _state_after(module: torch.nn.Module, loss: Tensor, batches: int = 1) -> dict[str, Tensor]:
    """The loss, every gradient, and every buffer."""
    for parameter in module.parameters():
        parameter.grad = None
    loss.backward()  # type: ignore[no-untyped-call]  # torch: untyped
    found = {"loss": loss.detach()}
    for name, parameter in module.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if batches > 1:  # statistics are kept batch by batch
        return found
    return found | {name: buffer.detach().double() for name, buffer in module.named_buffers()}


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    scale = max(1.0, float(expected["loss"].abs()))
    return max(float((value - expected[name]).abs().max()) for name, value in found.items()) / scale


def _run(task: TaskGraph, batches: Sequence[dict[str, Tensor]], shares: int, draw: random.Random) -> Tensor:
    """The task's loss, op by op, every op that may be split cut at random places."""
    size = task.task.batch_size
    cuts: list[Cuts] = []
    for op in task.ops:
        inner = [] if op.coupled else sorted(draw.sample(range(1, size), shares - 1))
        cuts.append(list(pairwise([0, *inner, size])))
    counts = _counts(task, batches, cuts[-1])
    return torch.stack([_run_batch(task, batch, cuts, counts, len(batches)) for batch in batches]).sum()


def _run_batch(
    task: TaskGraph,
    batch: dict[str, Tensor],
    cuts_of: Sequence[Cuts],
    counts: Sequence[Tensor],
    num_batches: int,
) -> Tensor:
    """What one of a step's batches adds to the loss."""
    values: dict[str, Tensor] = {}
    for op, cuts in zip(task.ops, cuts_of, strict=True):
        module = task.share_module(op)
        more = _more(task, op, cuts, counts, num_batches)
        arguments = [
            (*_given(task, op, batch, values, cut), *each) for cut, each in zip(cuts, more, strict=True)
        ]
        shares = [partial(module, *each) for each in arguments]
        if len(shares) == 1:
            results = [shares[0]()]
        elif op.contrasts:
            results = run_pairs(module, task, op, [0, *(last for _, last in cuts)], arguments)
        else:
            results = run_shares(module, shares)
        if op.is_loss:
            return _added(task, op, results, cuts, num_batches)
        for position, name in enumerate(op.outputs):
            parts = [result[position] for result in results]
            dim = task.values[name].batch_dim
            values[name] = parts[0] if dim is None else torch.cat(parts, dim)
    raise AssertionError("no op gives the loss")


def _added(task: TaskGraph, op: Op, results: Sequence[Tensor], cuts: Cuts, num_batches: int) -> Tensor:
    """Sum of what the shares of the loss add to it."""
    if op.shares is not None or task.task.reduction == "sum":
        return torch.stack(list(results)).sum()
    parts = [share_of_samples(last - first, task.task.batch_size, num_batches) for first, last in cuts]
    return torch.stack([result * part for result, part in zip(results, parts, strict=True)]).sum()


def _more(
    task: TaskGraph, op: Op, cuts: Cuts, counts: Sequence[Tensor], num_batches: int
) -> list[tuple[float | Tensor, ...]]:
    """What each share of a loss takes beside its samples: its part of them, and the counts."""
    if op.shares is None:
        return [()] * len(cuts)
    size = task.task.batch_size
    return [(share_of_samples(last - first, size, num_batches), *counts) for first, last in cuts]


def _counts(task: TaskGraph, batches: Sequence[dict[str, Tensor]], cuts: Cuts) -> list[Tensor]:
    """What all shares of all batches together count."""
    shares = task.ops[-1].shares
    if shares is None or not shares.num_counts:
        return []
    counter = LossCounter(task.root, shares)
    each = [
        counter.count(
            {name: batch[name][first:last] for name in counter.fields},
            share_of_samples(last - first, task.task.batch_size, len(batches)),
        )
        for batch in batches
        for first, last in cuts
    ]
    return list(torch.stack(each).sum(0))


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
