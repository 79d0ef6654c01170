"""Evaluate tasks of a run on this rank, together with the others."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from spindle_cli.errors import UsageError, WorkloadError
from spindle_cli.files.runs.evaluations import Evaluation
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.runtime.communication.communicators import Communicators
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.communication.rows import Samples
from spindle_cli.runtime.evaluating.at_lengths import EvaluatedAtLengths
from spindle_cli.runtime.evaluating.data import counts_of, fields_of, load
from spindle_cli.runtime.evaluating.gathering import Results
from spindle_cli.runtime.evaluating.measures import measured
from spindle_cli.runtime.evaluating.prepared import Prepared, Preparing
from spindle_cli.runtime.evaluating.untouched import untouched
from spindle_cli.runtime.loading.passes import NodePasses
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.workload.data.kind import is_stream
from spindle_cli.workload.evaluated.in_order import InOrder, Pass, ReadBatch, StreamInOrder, require_fields
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.losses.shares import share_of_samples
from spindle_cli.workload.training.item_draws import generators_kept
from spindle_cli.workload.training.precision import computing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class Evaluator:
    """One rank's side of all evaluations of a run. A task is prepared when it is first evaluated."""

    def __init__(
        self,
        model: LocalModel,
        source: str,
        rank: int,
        device: torch.device,
        communicators: Communicators,
        timeout_s: float,
        around: Callable[[], AbstractContextManager[None]],
        passes: Mapping[str, NodePasses],
        pool: GradientPool,
    ) -> None:
        """`source`: of the workload. `around`: what passes run in besides autocast. `passes`: by task, over
        data that other processes read. `pool`: of all trained parameters.
        """
        self._model = model
        self._rank = rank
        self._device = device
        self._around = around
        self._passes = passes
        self._pool = pool
        self._preparing = Preparing(
            model, source, rank, device, communicators, timeout_s, computing=self._computing, pool=pool
        )
        self._prepared: dict[str, Prepared] = {}
        self._at_lengths = EvaluatedAtLengths(self._preparing)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Those that have a dataset to be evaluated on."""
        tasks = self._model.graph.workload.all_tasks
        return tuple(task.name for task in tasks if task.eval_dataset is not None)

    def prepare(self) -> None:
        """Make ready what will be evaluated, so that what cannot be is known before anything is trained;
        collective. Raises what `evaluate` raises of tasks and datasets.
        """
        prepared = {name: self._prepare(name) for name in self.tasks}
        if not prepared:  # what may not be evaluated (adapters that eval mode merges) may be trained
            return
        with untouched(self._roots, self._device):
            for name, each in prepared.items():
                fields = each.graph.fields
                first = self._data(self._task(name), None).first()
                if first is None:
                    raise _empty(name)
                if each.slices or not each.graph.varying:
                    wanted = self._fitted(each, first).graph.fields
                    require_fields(name, wanted, fields, first.rows(0, 1, tuple(fields)))

    def close(self) -> None:
        """Take no more data; whoever reads them ends."""
        for passes in self._passes.values():
            passes.close()

    @property
    def _roots(self) -> list[nn.Module]:
        """The modules of all tasks."""
        graph = self._model.graph
        return [task.root for task in (*graph.tasks.values(), *graph.evaluations.values())]

    def _data(self, task: Any, dataset: Any) -> Pass:
        """The batches that a prepared task is evaluated on. `dataset`: None: the task's own."""
        if dataset is None and task.name in self._passes:
            return self._passes[task.name]
        taken = dataclasses.replace(task, dataset=task.eval_dataset if dataset is None else dataset)
        if is_stream(taken):
            return StreamInOrder(taken, self._model.train.seed)
        varies = bool(self._prepared[task.name].graph.varying)
        return InOrder(taken, self._model.train.seed, varies=varies)

    def evaluate(self, name: str, dataset: Any, step: int) -> Evaluation:
        """Evaluate a task, after so many steps, whose parameters are in place; collective.

        Args:
            dataset: map-style or a stream, read by this thread; None: the task's own.

        Raises:
            UsageError: there is no such task, or it has no dataset to be evaluated on.
            WorkloadError: the task cannot be traced in eval mode, or its plan cannot evaluate it; the dataset
                does not fit.
            RunFailedError: a metric fails.
        """
        task = self._task(name)
        if dataset is None and task.eval_dataset is None:
            raise UsageError(
                f"task {name!r}: there is no dataset to evaluate it on",
                hint="Give the task an eval_dataset, or evaluate() a dataset.",
            )
        began_s = time.perf_counter()
        prepared = self._prepare(name)
        # Passes of tasks that are trained gather what is shared out themselves.
        lent: Sequence[str] | None = () if name in self._model.graph.tasks else None
        moved = _moved(prepared.graph)
        with untouched(self._roots, self._device, moved), self._pool.whole(lent):
            num_samples, loss, gathered = self._run(prepared, self._data(task, dataset))
            metrics = measured(prepared.graph, gathered)  # which may draw random numbers
        return Evaluation(
            step=step,
            task=name,
            num_samples=num_samples,
            loss=loss,
            metrics=metrics,
            seconds=time.perf_counter() - began_s,
        )

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """What passes run in."""
        with self._around(), computing(self._model.train, self._device.type):
            yield

    def _task(self, name: str) -> Any:
        tasks = self._model.graph.workload.all_tasks
        for task in tasks:
            if task.name == name:
                return task
        known = ", ".join(task.name for task in tasks)
        raise UsageError(f"there is no task {name!r} to evaluate", hint=f"The tasks are {known}.")

    def _run(self, prepared: Prepared, data: Pass) -> tuple[int, float, dict[str, Tensor] | None]:
        """How many samples there were and the loss, on every rank; on rank 0 what was gathered of them."""
        graph, is_mean = prepared.graph, prepared.graph.task.reduction == "mean"
        results = Results(graph, prepared.wiring, self._rank, self._model.dtype)
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        num_samples = 0
        for read in data.batches():
            size = read.size
            _require_full(graph, size)
            fitted = self._fitted(prepared, read)
            loaded = load(fitted, read)
            counts = counts_of(fitted, loaded, size, self._device)
            arguments = partial(_loss_arguments, size, counts)
            fields = fields_of(fitted, loaded, self._device, self._model.dtype)
            batch = fitted.passes.run(size, fields, arguments)
            if batch.loss is not None:
                total += batch.loss * (size if is_mean else 1)
            results.gather(batch, size)
            num_samples += size
        if num_samples == 0:
            raise _empty(graph.task.name)
        total = total.cpu()
        dist.all_reduce(total, group=host_group())
        loss = total.item() / (num_samples if is_mean else 1)
        return num_samples, loss, results.whole() if self._rank == 0 else None

    def _fitted(self, prepared: Prepared, batch: ReadBatch) -> Prepared:
        """A task at the length of a batch; who runs none of it needs not know which that is."""
        if not (prepared.graph.varying and prepared.slices):
            return prepared
        return self._at_lengths.of(prepared, batch.shapes())

    def _prepare(self, name: str) -> Prepared:
        """Outside of `untouched`, which would put back buffers that are moved to the device or converted."""
        if name not in self._prepared:
            with generators_kept():
                self._prepared[name] = self._preparing.prepared(name)
        return self._prepared[name]


def _moved(graph: TaskGraph) -> list[nn.Parameter]:
    """What a task's forward passes change of its parameters."""
    root = graph.root
    return [root.get_parameter(name) for op in graph.ops for name in op.changes if name in op.parameters]


def _require_full(graph: TaskGraph, size: int) -> None:
    if graph.decided and size != graph.task.batch_size:
        raise WorkloadError(
            f"task {graph.task.name!r}: its forward decides by the size of the batch ({graph.decided[0]})"
            f", and the last batch of the dataset to evaluate it on has {size} samples",
            hint=f"Evaluate it on a multiple of {graph.task.batch_size} samples.",
        )


def _empty(task: str) -> WorkloadError:
    return WorkloadError(f"task {task!r}: the dataset to evaluate it on is empty", hint="Give it samples.")


def _loss_arguments(size: int, counts: Sequence[Tensor], there: Samples) -> Sequence[Any]:
    return (share_of_samples(there[1] - there[0], size, 1), *counts)
