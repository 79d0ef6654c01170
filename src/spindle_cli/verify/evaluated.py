"""Evaluations in plain PyTorch: the user's modules in eval mode, called as they are on batch after batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.analysis.autograd import Asking
from spindle_cli.analysis.evaluation import InOrder, stream_batches
from spindle_cli.errors import WorkloadError
from spindle_cli.files.runs.records import Evaluation
from spindle_cli.training.data.streams import is_stream
from spindle_cli.verify.flow import run_flow
from spindle_cli.workload.arguments import call_forward
from spindle_cli.workload.building.attributes import watching
from spindle_cli.workload.graph import root_of
from spindle_cli.workload.refuse import place_of_error
from spindle_cli.workload.types import FlowTask, Task, Workload

Batch = dict[str, Tensor]


def evaluate_all(
    workload: Workload,
    seed: int,
    step: int,
    fields: Callable[[Batch], Batch],
    computing: Callable[[], AbstractContextManager[object]],
) -> Iterator[Evaluation]:
    """Evaluate every task that has a dataset for it, after so many steps.

    Args:
        seed: of the train settings, from which follows what is drawn.
        fields: a batch where and in the numbers that the modules take it.
        computing: what passes run in.
    """
    for task in workload.all_tasks:
        if task.eval_dataset is not None:
            with torch.no_grad(), _in_eval_mode(root_of(task)):
                yield _evaluate(task, seed, step, fields, computing)


@contextmanager
def _in_eval_mode(root: nn.Module) -> Iterator[None]:
    """Inside; what passes change in attributes, buffers and parameters is undone: no evaluation sees
    another.
    """
    with watching(root):
        held = [(tensor, tensor.clone()) for tensor in (*root.buffers(), *root.parameters())]
        root.eval()
        yield
        for tensor, before in held:
            tensor.data.copy_(before)


def _run(task: Task | FlowTask, batch: Batch) -> Any:
    """Return what a task gives; with gradients where it asks for some itself, which fails without."""
    with Asking() as asking:
        try:
            return run_flow(task, batch) if isinstance(task, FlowTask) else call_forward(task, batch)
        except RuntimeError:
            if not asking.asks or torch.is_grad_enabled():
                raise
    with torch.enable_grad():
        return _run(task, batch)


def _evaluate(
    task: Task | FlowTask,
    seed: int,
    step: int,
    fields: Callable[[Batch], Batch],
    computing: Callable[[], AbstractContextManager[object]],
) -> Evaluation:
    began, count, total = perf_counter(), 0, 0.0
    results: dict[str, list[Tensor]] = {}
    task = replace(task, dataset=task.eval_dataset)
    for batch in _batches(task, seed):
        size = len(next(iter(batch.values())))
        with computing():
            output = _run(task, fields(batch))
        loss, others = _parted(output)
        total += float(loss) * (size if task.reduction == "mean" else 1)
        count += size
        for key, value in others.items():
            if value.dim() > 0 and len(value) == size:
                results.setdefault(key, []).append(value.detach().cpu())
    whole = {key: _joined(task, key, parts) for key, parts in results.items()} if task.metrics else {}
    return Evaluation(
        step=step,
        task=task.name,
        num_samples=count,
        loss=total / (count if task.reduction == "mean" else 1),
        metrics={name: _measured(task, name, whole) for name in task.metrics},
        seconds=perf_counter() - began,
    )


def _joined(task: Task | FlowTask, key: str, parts: list[Tensor]) -> Tensor:
    """Return what forward gives beside its loss, of all batches.

    Raises:
        WorkloadError: its size follows the length of a batch.
    """
    first = parts[0]
    for part in parts:
        if (part.shape[1:], part.dtype) != (first.shape[1:], first.dtype):
            expected, found_instead = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (first, part))
            raise WorkloadError(
                f"task {task.name!r}: metrics are given one tensor with {key!r} of all samples, "
                f"and for batches of different lengths forward gives {expected} and {found_instead}",
                hint="Let forward return what has one size at every length, as sums over the length.",
            )
    return torch.cat(parts)


def _measured(task: Task | FlowTask, name: str, whole: Mapping[str, Tensor]) -> float:
    """One metric. What it was given, with which types, says more of it than torch does: in low precision a
    model's results may be of another type than its labels.

    Raises:
        WorkloadError: it raises something, or gives no number.
    """
    try:
        return float(task.metrics[name](dict(whole)))
    except Exception as error:  # code of the user's
        place = place_of_error(error)
        given = ", ".join(
            f"{key} ({str(value.dtype).removeprefix('torch.')})" for key, value in whole.items()
        )
        raise WorkloadError(
            f"the metric {name!r} of task {task.name!r} failed: {type(error).__name__}: {error}"
            f"{f', at {place}' if place else ''}",
            hint=f"Forward gives {given or 'nothing'} beside its loss.",
        ) from error


def _batches(task: Task | FlowTask, seed: int) -> Iterator[Batch]:
    if is_stream(task):
        yield from stream_batches(task, seed)
        return
    data = InOrder(task, seed)
    for number in range(data.num_batches):
        yield data.rows(number, 0, data.size(number))


def _parted(output: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the loss, and what forward gives beside it."""
    if not isinstance(output, Mapping):
        return output, {}
    others = {key: value for key, value in output.items() if key != "loss" and isinstance(value, Tensor)}
    return output["loss"], others
