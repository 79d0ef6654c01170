"""Evaluate tasks of a run on this rank, together with the others."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from spindle_cli.errors import UsageError, WorkloadError
from spindle_cli.files.runs.evaluations import Evaluation
from spindle_cli.runtime.communication.communicators import Communicators
from spindle_cli.runtime.communication.rows import Samples
from spindle_cli.runtime.evaluating.gathering import Results
from spindle_cli.runtime.evaluating.measures import measured
from spindle_cli.runtime.evaluating.passes import Fields, present
from spindle_cli.runtime.evaluating.prepared import Prepared, Preparing
from spindle_cli.runtime.evaluating.untouched import untouched
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.runtime.step.compute import LocalSlice
from spindle_cli.workload.evaluated.in_order import InOrder
from spindle_cli.workload.losses.shares import share_of_samples
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
    ) -> None:
        """`source`: of the workload. `around`: what passes run in besides autocast."""
        self._model = model
        self._rank = rank
        self._device = device
        self._around = around
        self._preparing = Preparing(
            model, source, rank, device, communicators, timeout_s, computing=self._computing
        )
        self._prepared: dict[str, Prepared] = {}

    @property
    def tasks(self) -> tuple[str, ...]:
        """Those that have a dataset to be evaluated on."""
        tasks = self._model.graph.workload.all_tasks
        return tuple(task.name for task in tasks if task.eval_dataset is not None)

    def prepare(self) -> None:
        """Make ready what will be evaluated, so that what cannot be is known before anything is trained;
        collective. Raises what `evaluate` raises of tasks and datasets.
        """
        with untouched(self._roots, self._device):
            for name in self.tasks:
                fields = self._prepare(name).graph.fields
                task = self._task(name)
                data = self._data(task, task.eval_dataset)
                data.rows(0, 0, 1, tuple(fields))

    @property
    def _roots(self) -> list[nn.Module]:
        """Of all tasks."""
        graph = self._model.graph
        return [task.root for task in (*graph.tasks.values(), *graph.evaluations.values())]

    def _data(self, task: Any, dataset: Any) -> InOrder:
        fields = self._prepare(task.name).graph.fields
        taken = dataclasses.replace(task, dataset=dataset)
        return InOrder(taken, dataset, self._model.train.seed, fields)

    def evaluate(self, name: str, dataset: Any, step: int) -> Evaluation:
        """Evaluate a task, after so many steps, whose parameters are in place; collective.

        Args:
            dataset: map-style; None: the task's own.

        Raises:
            UsageError: there is no such task, or it has no dataset to be evaluated on.
            WorkloadError: the task cannot be traced in eval mode, or its plan cannot evaluate it; the dataset
                does not fit.
            RunFailedError: a metric fails.
        """
        task = self._task(name)
        chosen = task.eval_dataset if dataset is None else dataset
        if chosen is None:
            raise UsageError(
                f"task {name!r}: there is no dataset to evaluate it on",
                hint="Give the task an eval_dataset, or evaluate() a dataset.",
            )
        began_s = time.perf_counter()
        with untouched(self._roots, self._device):
            prepared = self._prepare(name)
            data = self._data(task, chosen)
            loss, gathered = self._run(prepared, data)
            metrics = measured(prepared.graph, gathered)  # which may draw random numbers
        return Evaluation(
            step=step,
            task=name,
            num_samples=data.num_samples,
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

    def _run(self, prepared: Prepared, data: InOrder) -> tuple[float, dict[str, Tensor] | None]:
        """The loss, on every rank, and on rank 0 what was gathered of all samples."""
        graph, is_mean = prepared.graph, prepared.graph.task.reduction == "mean"
        if graph.decided and data.num_samples % graph.task.batch_size:
            raise WorkloadError(
                f"task {graph.task.name!r}: its forward decides by the size of the batch ({graph.decided[0]})"
                f", and the last batch of {data.num_samples} samples is not full",
                hint=f"Evaluate it on a multiple of {graph.task.batch_size} samples.",
            )
        results = Results(graph, prepared.wiring, self._rank, self._device, self._model.dtype)
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        for number in range(data.num_batches):
            size = data.size(number)
            loaded = self._load(prepared, data, number)
            counts = self._counts(prepared, loaded, size)
            arguments = partial(_loss_arguments, size, counts)
            batch = prepared.passes.run(size, self._fields_of(prepared, loaded), arguments)
            if batch.loss is not None:
                total += batch.loss * (size if is_mean else 1)
            results.gather(batch, size)
        dist.all_reduce(total)
        loss = total.item() / (data.num_samples if is_mean else 1)
        return loss, results.whole() if self._rank == 0 else None

    def _load(self, prepared: Prepared, data: InOrder, number: int) -> dict[Samples, dict[str, Tensor]]:
        """What this rank's slices read of a batch, by samples, on the host."""
        size = data.size(number)
        wanted: dict[Samples, dict[str, None]] = {}
        for local in prepared.slices.values():
            there = present(local.samples, size)
            if local.wired.fields and there[0] < there[1]:
                wanted.setdefault(there, {}).update(dict.fromkeys(local.wired.fields))
        return {there: data.rows(number, *there, tuple(names)) for there, names in wanted.items()}

    def _fields_of(self, prepared: Prepared, loaded: dict[Samples, dict[str, Tensor]]) -> Fields:
        dtype, specs = self._model.dtype, prepared.graph.fields

        def none_of(name: str) -> Tensor:
            return torch.empty((0, *specs[name].shape[1:]), dtype=specs[name].dtype)

        def fields(samples: Samples, names: Sequence[str]) -> dict[str, Tensor]:
            held = loaded.get(samples) or {name: none_of(name) for name in names}
            return {
                name: held[name].to(
                    self._device, dtype if dtype is not None and held[name].is_floating_point() else None
                )
                for name in names
            }

        return fields

    def _counts(
        self, prepared: Prepared, loaded: dict[Samples, dict[str, Tensor]], size: int
    ) -> Sequence[Tensor]:
        """What the loss counts of a batch, over all ranks."""
        shares = prepared.graph.loss_shares
        if shares.num_counts == 0:
            return ()
        total = torch.zeros(shares.num_counts, dtype=torch.float64)
        for local in prepared.slices.values():
            there = present(local.samples, size)
            if prepared.counter is not None and _speaks(local) and there[0] < there[1]:
                share = share_of_samples(there[1] - there[0], size, 1)
                total += prepared.counter.count(loaded[there], share)
        total = total.to(self._device)
        dist.all_reduce(total)
        return total.unbind()

    def _prepare(self, name: str) -> Prepared:
        if name not in self._prepared:
            self._prepared[name] = self._preparing.prepared(name)
        return self._prepared[name]


def _speaks(local: LocalSlice) -> bool:
    return local.wired.loss_shares is not None and local.is_first


def _loss_arguments(size: int, counts: Sequence[Tensor], there: Samples) -> Sequence[Any]:
    return (share_of_samples(there[1] - there[0], size, 1), *counts)
