"""Evaluate tasks of a run on this rank, together with the others, without a trace: what is trained goes on as
if nothing had been evaluated.

A task is made ready for another length than the planned one when that comes, and is kept. What forward
returns for each sample goes from the ranks that have it to rank 0, in the samples' order. There the user's
metrics are called on it; all ranks get what they give, or why one fails.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spindle_cli.analysis.evaluation import (
    EvaluationTracer,
    InOrder,
    Pass,
    ReadBatch,
    StreamInOrder,
    require_fields,
)
from spindle_cli.analysis.losses.counts import share_of_samples
from spindle_cli.errors import RunFailedError, UsageError, WorkloadError
from spindle_cli.files.runs.records import Evaluation
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.runtime.communication.communicators import Communicators
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.communication.rows import Samples, empty_share
from spindle_cli.runtime.communication.wiring import Wiring
from spindle_cli.runtime.evaluating.passes import BatchRun, Fields, present
from spindle_cli.runtime.evaluating.prepared import Prepared, Preparing
from spindle_cli.runtime.loading.passes import NodePasses
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.runtime.step.held_state import HeldState
from spindle_cli.training.data.streams import is_stream
from spindle_cli.training.items import generators_kept
from spindle_cli.training.precision import computing, dtype_in
from spindle_cli.units import format_seconds
from spindle_cli.workload.building.load import load_abstract
from spindle_cli.workload.building.memory import RefusingWrites
from spindle_cli.workload.graph import IGNORED_LABEL, TaskGraph, ValueSpec
from spindle_cli.workload.refuse import place_of_error
from spindle_cli.workload.types import Metric

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# Lengths of each task that are kept; of more, those that came last.
_KEPT = 64


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
        """The tasks that have a dataset to be evaluated on."""
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
            for name, evaluation in prepared.items():
                fields = evaluation.graph.fields
                first = self._data(self._task(name), None).first()
                if first is None:
                    raise _empty(name)
                if evaluation.slices or not evaluation.graph.varying:
                    wanted = self._fitted(evaluation, first).graph.fields
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
        """Enter the contexts in which the passes of an evaluation compute."""
        with self._around(), computing(self._model.train, self._device.type):
            yield

    def _task(self, name: str) -> Any:
        tasks = self._model.graph.workload.all_tasks
        for task in tasks:
            if task.name == name:
                return task
        names = ", ".join(task.name for task in tasks)
        raise UsageError(f"there is no task {name!r} to evaluate", hint=f"The tasks are {names}.")

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


Shape = tuple[int, ...]  # of one sample


class EvaluatedAtLengths:
    """Makes what a rank evaluates where batches have other lengths than the planned one."""

    def __init__(self, preparing: Preparing) -> None:
        self._preparing = preparing
        self._tracer: EvaluationTracer | None = None
        self._made: dict[str, OrderedDict[tuple[tuple[str, Shape], ...], Prepared]] = {}

    def of(self, planned: Prepared, shapes: Mapping[str, Shape]) -> Prepared:
        """A task for batches with these shapes of one sample, by field; of this rank alone.

        Args:
            planned: at the planned length.

        Raises:
            WorkloadError: it cannot be evaluated at this length, or a field is missing.
        """
        graph = planned.graph
        key = tuple((name, tuple(shapes[name])) for name in graph.varying if name in shapes)
        if all(_is_planned(planned, name, shape) for name, shape in key):
            return planned
        kept = self._made.setdefault(graph.task.name, OrderedDict())
        if key not in kept:
            began = time.monotonic()
            kept[key] = self._at(planned, dict(key))
            shown = ", ".join(f"{field} of {shape}" for field, shape in key)
            what = f"task {graph.task.name!r}: ready to be evaluated on samples with {shown}"
            print(f"{what}: {format_seconds(time.monotonic() - began)}", flush=True)
            if len(kept) > _KEPT:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key]

    def _at(self, planned: Prepared, shapes: Mapping[str, Shape]) -> Prepared:
        if self._tracer is None:
            with generators_kept():
                workload = load_abstract(self._preparing.source, reads_initial=False).workload
                self._tracer = EvaluationTracer(workload, self._preparing.model.memo)
        return self._preparing.at_length(planned, self._tracer.at(planned.route.traced, shapes))


def _is_planned(planned: Prepared, name: str, shape: Shape) -> bool:
    """Whether it is as planned, or cannot be run at all: who takes the batch then says why."""
    spec, varies = planned.graph.fields[name].shape[1:], planned.graph.varying[name]
    fits = len(shape) == len(spec) and all(
        differs or size == planned_size
        for size, planned_size, differs in zip(shape, spec, varies, strict=True)
    )
    return shape == spec or not fits


Loaded = Mapping[Samples, Mapping[str, "Tensor"]]  # by samples, on the host


def load(prepared: Prepared, batch: ReadBatch) -> Loaded:
    """What this rank's slices read of a batch.

    Raises:
        WorkloadError: it has other fields or shapes than the task was traced with; or labels of an
            operator's mean are ignored, of which shares know nothing.
        Exception: whatever the dataset raised.
    """
    wanted: dict[Samples, dict[str, None]] = {}
    for local in prepared.slices.values():
        there = present(local.samples, batch.size)
        if local.wired.fields and there[0] < there[1]:
            wanted.setdefault(there, {}).update(dict.fromkeys(local.wired.fields))
    name, loaded = prepared.graph.task.name, {}
    for there, names in wanted.items():
        loaded[there] = batch.rows(*there, tuple(names))
        require_fields(name, prepared.graph.fields, names, loaded[there])
    _require_all_count(prepared, loaded)
    return loaded


def _require_all_count(prepared: Prepared, loaded: Loaded) -> None:
    for local in prepared.slices.values():
        whole = (0, prepared.graph.task.batch_size)
        if local.wired.loss_shares is None or local.samples == whole:
            continue
        for name in local.wired.loss_shares.all_must_count:
            held = [rows[name] for rows in loaded.values() if name in rows]
            if any(bool((labels == IGNORED_LABEL).any()) for labels in held):
                raise WorkloadError(
                    f"task {prepared.graph.task.name!r}: the dataset to evaluate it on ignores labels "
                    f"({IGNORED_LABEL}) of field {name!r}, of which an operator takes the mean, and the plan "
                    "splits its batch",
                    hint="Take the mean in the task's forward; or list the operator in `coupled`.",
                )


def fields_of(prepared: Prepared, loaded: Loaded, device: torch.device, dtype: torch.dtype | None) -> Fields:
    """What passes take of it, on the device; `dtype`: of all floating-point numbers, None: their own."""
    specs = prepared.graph.fields

    def none_of(name: str) -> Tensor:
        return torch.empty((0, *specs[name].shape[1:]), dtype=specs[name].dtype)

    def fields(samples: Samples, names: Sequence[str]) -> dict[str, Tensor]:
        held = loaded.get(samples) or {name: none_of(name) for name in names}
        return {name: held[name].to(device, dtype_in(held[name].dtype, dtype)) for name in names}

    return fields


def counts_of(prepared: Prepared, loaded: Loaded, size: int, device: torch.device) -> Sequence[Tensor]:
    """What the loss counts of a batch, over all ranks; collective where it counts anything."""
    shares = prepared.graph.loss_shares
    if shares.num_counts == 0:
        return ()
    total = torch.zeros(shares.num_counts, dtype=torch.float64)
    for local in prepared.slices.values():
        there = present(local.samples, size)
        speaks = local.wired.loss_shares is not None and local.is_first
        if prepared.counter is not None and speaks and there[0] < there[1]:
            share = share_of_samples(there[1] - there[0], size, 1)
            total += prepared.counter.count(loaded[there], share)
    dist.all_reduce(total, group=host_group())
    return total.to(device).unbind()


@dataclass(frozen=True)
class _ResultShare:
    """Rows of a result, and the rank that hands them in."""

    key: str
    spec: ValueSpec
    samples: Samples
    owner: int


class Results:
    """Rank 0 gathers them batch by batch, into its host's memory."""

    def __init__(self, task: TaskGraph, wiring: Wiring, rank: int, dtype: torch.dtype | None) -> None:
        """`dtype`: that everything floating-point was converted to, if it was."""
        self._rank = rank
        self._rows: dict[str, list[Tensor]] = {key: [] for key in task.results}
        self._result_shares: list[_ResultShare] = []
        for wired in wiring.slices:
            for key in (
                key for op in wired.ops for key in op.results if wired.task.task.name == task.task.name
            ):
                spec = task.results[key]
                spec = replace(spec, dtype=dtype_in(spec.dtype, dtype))
                self._result_shares += [
                    _ResultShare(key, spec, wired.layout.rows(share), wired.layout.holders(share)[0])
                    for share in range(wired.layout.dp)
                ]
        self._result_shares.sort(key=lambda result: result.samples)  # micro-batches may run in another order

    def gather(self, batch: BatchRun, size: int) -> None:
        """Hand in those of a batch of `size` samples; collective."""
        for result in self._result_shares:
            there = present(result.samples, size)
            if there[0] == there[1]:
                continue
            mine = batch.results.get((result.key, there)) if result.owner == self._rank else None
            if mine is not None:
                mine = mine.detach().to(result.spec.dtype).contiguous().cpu()
            if result.owner != 0:
                mine = self._moved(result, there, mine)
            if self._rank == 0:
                assert mine is not None, "it has arrived"
                self._rows[result.key].append(mine)

    def _moved(self, result: _ResultShare, there: Samples, mine: Tensor | None) -> Tensor | None:
        if mine is not None:
            dist.send(mine, 0, group=host_group())
        elif self._rank == 0:
            mine = empty_share(result.spec, there, torch.device("cpu"))
            dist.recv(mine, result.owner, group=host_group())
        return mine

    def whole(self) -> dict[str, Tensor]:
        """All samples' rows by key, on rank 0."""
        return {key: torch.cat(rows) for key, rows in self._rows.items() if rows}


def measured(task: TaskGraph, gathered: dict[str, Tensor] | None) -> dict[str, float]:
    """Each metric of a task; collective. `gathered`: on rank 0.

    Raises:
        RunFailedError: on every rank, where a metric raises something or gives no number.
    """
    metrics = task.task.metrics
    if not metrics:
        return {}
    told: list[Any] = [None if gathered is None else _all(task, metrics, gathered)]
    dist.broadcast_object_list(told, group=host_group())
    (values,) = told
    if isinstance(values, str):
        raise RunFailedError(values, hint="Checkpoints from before are there: go on from one with --resume.")
    return {name: float(value) for name, value in values.items()}


def _all(
    task: TaskGraph, metrics: Mapping[str, Metric], gathered: dict[str, Tensor]
) -> dict[str, float] | str:
    """What all of them give; or what is wrong with the first that fails."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        where = f"the metric {name!r} of task {task.task.name!r}"
        try:
            value = metric(dict(gathered))
        except Exception as error:  # code of the user's
            place = place_of_error(error)
            at = f", at {place}" if place else ""
            return f"{where} failed: {type(error).__name__}: {error}{at}{_given(task, gathered)}"
        try:
            values[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            return f"{where} gave a {type(value).__name__}, expected one number"
    return values


def _given(task: TaskGraph, gathered: Mapping[str, Tensor]) -> str:
    given = ", ".join(gathered) or "nothing"
    left = f"; left out, as they have no row for each sample: {', '.join(task.left_out)}"
    return f" (forward gives {given} beside its loss{left if task.left_out else ''})"


@contextmanager
def untouched(
    modules: Sequence[nn.Module], device: torch.device, moved: Sequence[nn.Parameter] = ()
) -> Iterator[None]:
    """Inside, modules are in eval mode; afterwards they have the modes, attributes and buffers of before, and
    generators of random numbers go on as if nothing had been drawn.

    Args:
        moved: parameters that forward changes, which have their values of before, too.

    Raises:
        WorkloadError: a module's own `eval` changes parameters (as one that merges adapters does).
    """
    with ExitStack() as stack:
        stack.enter_context(generators_kept())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        with torch.no_grad():
            values = [(parameter, parameter.detach().clone()) for parameter in moved]
        stack.callback(_put_back, values)
        for module in modules:
            stack.callback(HeldState(module).restore)
            versions = _versions(module)
            with RefusingWrites(module.named_parameters, partial(_refusal, module)):
                module.eval()
            changed = [name for name, version in _versions(module).items() if versions.get(name) != version]
            if changed:
                raise _refusal(module, changed[0])
        yield


def _put_back(values: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, before in values:
        parameter.data.copy_(before)


def _refusal(module: nn.Module, name: str) -> WorkloadError:
    return WorkloadError(
        f"{type(module).__name__}: putting it into eval mode changes parameter {name!r}, which would not be "
        "trained any more as it was",
        hint="Let `train(False)` leave parameters as they are (loralib: merge_weights=False); compute with "
        "them in forward.",
    )


def _versions(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Which tensor each parameter is, in which memory it lies, and how often it was changed."""
    return {
        name: (id(held), held.untyped_storage()._cdata, held._version)
        for name, held in module.named_parameters()
    }
