"""Evaluation of tasks: what it needs of the devices, how a task is traced for it, and in which order it runs.

What a task that is only evaluated needs of what other tasks train: which op, which tensors.

A workload's tasks as an evaluation runs them, at the planned length and at others: traced with all modules
in eval mode, ops giving what forward returns beside the loss.

A dataset read once, in its own order: what an evaluation takes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from spindle_cli.analysis.at_lengths import require_same_ops, way_through
from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.analysis.metaops.finding import Finder
from spindle_cli.analysis.metaops.sharing import still_buffers, tensors_of
from spindle_cli.analysis.metaops.task import analyse_task
from spindle_cli.analysis.splitting.shared_state import refuse_shared_state
from spindle_cli.errors import WorkloadError
from spindle_cli.training.batches import collate, filled, num_samples
from spindle_cli.training.data.streams import StreamPass
from spindle_cli.training.items import Epochs, SeededCalls, generators_kept
from spindle_cli.workload.building.load import load_abstract
from spindle_cli.workload.graph import MetaOp, ParameterTable, TaskGraph, ValueSpec, WorkloadGraph, root_of
from spindle_cli.workload.refuse import refusal
from spindle_cli.workload.types import FlowTask, Task, Workload


@dataclass(frozen=True)
class NeededOp:
    """One op of the task.

    Attributes:
        metaop: that it is of, and its `position` in that.
        inputs: of the ops whose values it takes, their places among all of the task.
        tensors: the parameters and buffers, by canonical name, that ops of trained tasks use too.
        is_whole: it needs the whole batch.
    """

    metaop: str
    position: int
    inputs: tuple[int, ...]
    tensors: frozenset[str]
    is_whole: bool


@dataclass(frozen=True)
class NeededMetaOp:
    """A MetaOp of the task; `output_bytes`: that its last op hands on, for the whole batch."""

    name: str
    num_ops: int
    inputs: tuple[str, ...]
    inputs_of_every_op: tuple[str, ...]
    output_bytes: int
    inner_output_bytes: int


@dataclass(frozen=True)
class Needs:
    """What a whole task needs to be evaluated.

    Attributes:
        ops: in the order in which they run.
        held: the tensors that each op of a trained task uses, by MetaOp and position in it.
    """

    task: str
    batch_size: int
    metaops: tuple[NeededMetaOp, ...]
    ops: tuple[NeededOp, ...]
    held: dict[tuple[str, int], frozenset[str]]


def needs_of(graph: WorkloadGraph, name: str) -> Needs:
    """The needs of one of the tasks that are only evaluated."""
    evaluated = graph.only_evaluated(name)
    task = evaluated.tasks[name]
    table = names_of_all(graph)
    held = {
        (metaop.name, position): _tensors(table, graph.tasks[metaop.task], index)
        for metaop in graph.metaops
        for position, index in enumerate(metaop.ops)
    }
    trained = frozenset[str]().union(*held.values())
    places = {
        index: (metaop.name, position)
        for metaop in evaluated.metaops
        for position, index in enumerate(metaop.ops)
    }
    ops = tuple(
        NeededOp(
            *places[op.index],
            inputs=tuple(dict.fromkeys(task.producer[value] for value in op.inputs)),
            tensors=_tensors(table, task, op.index) & trained,
            is_whole=op.coupled or op.talks,
        )
        for op in task.ops
    )
    metaops = tuple(_needed(task, metaop) for metaop in evaluated.metaops)
    return Needs(name, task.task.batch_size, metaops, ops, held)


def names_of_all(graph: WorkloadGraph) -> ParameterTable:
    """The names of all parameters and buffers, with those of the tasks that are only evaluated behind the
    others'.
    """
    names = [task.name for task in graph.workload.evaluated if task.name in graph.evaluations]
    only = {name: graph.evaluations[name] for name in names}
    return ParameterTable.of(replace(graph, tasks={**graph.tasks, **only}))


def _tensors(table: ParameterTable, task: TaskGraph, index: int) -> frozenset[str]:
    op = task.ops[index]
    return frozenset(table.of_op(task.task.name, (*op.parameters, *op.buffers)))


def _needed(task: TaskGraph, metaop: MetaOp) -> NeededMetaOp:
    handed_on = [
        sum(task.values[value].num_bytes for value in task.ops[index].outputs) for index in metaop.ops
    ]
    return NeededMetaOp(
        metaop.name,
        len(metaop.ops),
        metaop.inputs,
        metaop.inputs_of_every_op,
        output_bytes=handed_on[-1],
        inner_output_bytes=handed_on[0],
    )


_FROM_ONE = (
    "Compute what forward returns beside the loss from one operator's output, or from what the loss takes."
)


def trace_evaluations(graph: WorkloadGraph, finder: Finder) -> dict[str, TaskGraph]:
    """Every task of a workload that has a dataset to be evaluated on, as it is evaluated, by name.

    `finder`: of layers in eval mode. Random numbers are drawn; generators are the caller's.

    Raises:
        WorkloadError: forward takes another way through its operators in eval mode than in training, or
            cannot be traced.
    """
    workload = graph.workload
    trained = [task for task in workload.tasks if task.eval_dataset is not None]
    return {
        task.name: _traced(task, workload, finder, graph.tasks.get(task.name))
        for task in (*trained, *map(evaluated_on_its_own, workload.evaluated))
    }


def analyse_evaluation(source: str, graph: WorkloadGraph, name: str) -> TaskGraph:
    """A trained task of the workload at `source` as it is evaluated, over the modules of `graph`, of another
    build. Raises what `trace_evaluations` raises.
    """
    workload = load_abstract(source, reads_initial=False).workload
    task = next(task for task in workload.tasks if task.name == name)
    trained = graph.tasks[name]
    evaluated = _traced(task, workload, Finder(), trained)
    evaluated.hand_constants_on(trained.root)
    return replace(evaluated, task=trained.task, root=trained.root)


def evaluated_on_its_own(task: Task | FlowTask) -> Task | FlowTask:
    """A task that is only evaluated, with the dataset for that as its own."""
    return replace(task, dataset=task.eval_dataset)


def _traced(
    task: Task | FlowTask, workload: Workload, finder: Finder, trained: TaskGraph | None
) -> TaskGraph:
    with in_eval_mode(task):
        shapes = {field: trained.fields[field].shape[1:] for field in trained.varying} if trained else {}
        results = bool(task.metrics)
        graph = analyse_task(task, workload, finder, keeps_results=results, shapes=shapes, like=trained)
    refuse_shared_state({task.name: graph})
    if graph.moves:
        raise refusal(
            task.name,
            f"forward moves {graph.moves[0].slow!r} in eval mode too, so that to evaluate would change what "
            "is trained",
            graph.moves[0].place,
            "Move it in training alone: `if self.training:`.",
        )
    if trained is None:
        return replace(graph, varying=_padded(task, graph))
    _require_same_way(trained, graph)
    return replace(graph, varying=trained.varying)


def _padded(task: Task | FlowTask, graph: TaskGraph) -> dict[str, tuple[bool, ...]]:
    """What may differ from batch to batch of a task that is only evaluated, of whose batches none was looked
    at: all sizes that a collate of its own makes.
    """
    if task.collate is None:
        return {}
    return {name: (True,) * len(spec.shape[1:]) for name, spec in graph.fields.items() if spec.shape[1:]}


@contextmanager
def in_eval_mode(task: Task | FlowTask) -> Iterator[None]:
    """Inside, a task's modules are in eval mode; afterwards in the modes of before."""
    root = root_of(task)
    modes = [(module, module.training) for module in root.modules()]
    try:
        root.eval()
        yield
    finally:
        root.train()  # a module's own way back
        for module, mode in modes:
            module.training = mode


def _require_same_way(trained: TaskGraph, evaluated: TaskGraph) -> None:
    name = trained.task.name
    trained_way, evaluated_way = way_through(trained), way_through(evaluated)
    if trained_way != evaluated_way:
        raise WorkloadError(
            f"task {name!r}: its forward in eval mode takes another way through its operators: "
            f"{', '.join(evaluated_way)}; in training it takes {', '.join(trained_way)}",
            hint="Let forward call the same operators in both. " + _FROM_ONE,
        )
    still = still_buffers(trained, evaluated.root)
    for before, now in zip(trained.ops, evaluated.ops, strict=True):
        trained_sources = {trained.producer[value] for value in before.inputs}
        new_sources = {evaluated.producer[value] for value in now.inputs} - trained_sources
        if new_sources:
            source = evaluated.ops[min(new_sources)].target
            raise WorkloadError(
                f"task {name!r}: in eval mode {now.target or 'its loss'} takes what {source} gives, which it "
                "does not in training",
                hint=_FROM_ONE,
            )
        held = still.union(id(tensor) for _, tensor in tensors_of(evaluated.root, before))
        strange = [
            tensor_name for tensor_name, tensor in tensors_of(evaluated.root, now) if id(tensor) not in held
        ]
        if strange:
            raise WorkloadError(
                f"task {name!r}: in eval mode {now.target or 'its loss'} takes {strange[0]!r}, "
                "which it does not in training: its devices need not have that as it is trained",
                hint="Let forward use the same parameters and buffers with the same operators in both.",
            )


class EvaluationTracer:
    """Traces tasks of a workload as they are evaluated at other lengths than the planned ones."""

    def __init__(self, workload: Workload, memo: AnalysisMemo | None = None) -> None:
        """`workload`: another build of that whose tasks are planned; it is changed by nothing. `memo`: what
        was found of it.
        """
        self._workload = workload
        self._finder = Finder(memo)

    def at(self, planned: TaskGraph, shapes: Mapping[str, tuple[int, ...]]) -> TaskGraph:
        """A task for batches with these shapes of one sample, by field, over the modules of this tracer's
        build.

        Args:
            planned: as it is evaluated at the planned length.

        Raises:
            WorkloadError: it cannot be traced, or has other ops or values at this length; or what metrics
                are given has.
        """
        name = planned.task.name
        task = next(task for task in self._workload.all_tasks if task.name == name)
        if task.dataset is None:
            task = evaluated_on_its_own(task)
        with in_eval_mode(task), generators_kept():
            traced = analyse_task(
                task,
                self._workload,
                self._finder,
                keeps_results=bool(task.metrics),
                shapes=shapes,
                like=planned,
            )
        require_same_ops(planned, traced, shapes)
        _require_same_results(planned, traced)
        return traced


def _require_same_results(planned: TaskGraph, at_length: TaskGraph) -> None:
    """Refuse results that make no one tensor of all samples."""
    for key, spec in planned.results.items():
        new_spec = at_length.results.get(key)
        if new_spec is None or (new_spec.shape, new_spec.dtype, new_spec.batch_dim) != (
            spec.shape,
            spec.dtype,
            spec.batch_dim,
        ):
            shown = "none" if new_spec is None else f"{new_spec.dtype} {new_spec.shape}"
            raise WorkloadError(
                f"task {planned.task.name!r}: metrics are given one tensor with {key!r} of all samples, "
                f"and for batches of different lengths forward gives {spec.dtype} {spec.shape} and {shown}",
                hint="Let forward return what has one size at every length, as sums over the length.",
            )


class ReadBatch(Protocol):
    """A batch of so many samples: the task's `batch_size`, and of the last one what is left."""

    @property
    def size(self) -> int: ...

    def rows(self, first: int, last: int, fields: Collection[str]) -> Mapping[str, Tensor]:
        """Samples [first, last), collated; of the named fields those that there are."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of one sample of each field, for tasks whose batches have several lengths."""


class Pass(Protocol):
    """A task's data for an evaluation."""

    def batches(self) -> Iterator[ReadBatch]:
        """All of it, from its first sample to its last."""

    def first(self) -> ReadBatch | None:
        """The first batch, before anything is evaluated; None: there is no sample."""


class InOrder:
    """A map-style dataset, batch by batch in its order; only the rows that are asked for are read, but where
    `reads_whole`.

    What an item draws follows from the seed and its index, in every evaluation alike; of a dataset with
    epochs it is its first.
    """

    def __init__(self, task: Task | FlowTask, seed: int, *, varies: bool = False) -> None:
        """`task`: with the dataset that it is evaluated on as its own. `varies`: samples may have other sizes
        from batch to batch, so that all of a batch is read.

        Raises:
            WorkloadError: the dataset is not map-style.
        """
        self.task = task
        # A collate may pad, or mix samples.
        self.reads_whole = varies or task.collate is not None
        self._epochs = Epochs(task, seed)
        self._reads = SeededCalls(seed, task.name, "sample")
        self._collates = SeededCalls(seed, task.name, "batch")
        self.num_samples = num_samples(task)

    @property
    def num_batches(self) -> int:
        """How many batches the data have; the last may not be full."""
        return -(-self.num_samples // self.task.batch_size)

    def batches(self) -> Iterator[ReadBatch]:
        """See `Pass`."""
        for number in range(self.num_batches):
            yield _Numbered(self, number)

    def first(self) -> ReadBatch | None:
        """See `Pass`."""
        return next(self.batches(), None)

    def size(self, number: int) -> int:
        """How many samples a batch has."""
        return min(self.task.batch_size, self.num_samples - number * self.task.batch_size)

    def rows(self, number: int, first: int, last: int) -> dict[str, Tensor]:
        """Samples [first, last) of a batch, as far as there are, collated.

        Raises:
            WorkloadError: items cannot be collated.
            Exception: whatever the dataset raised, with a note of the samples.
        """
        whole = self.reads_whole
        begin = number * self.task.batch_size
        start, stop = (0, self.size(number)) if whole else (first, min(last, self.size(number)))
        with generators_kept():
            try:
                with self._epochs.at(0):
                    items = [self._item(index) for index in range(begin + start, begin + stop)]
                    batch = self._collates.call(partial(collate, self.task, items), 0, number)
            except Exception as error:
                error.add_note(
                    f"while loading samples {begin + start} to {begin + stop - 1} of the dataset that task "
                    f"{self.task.name!r} is evaluated on"
                )
                raise
        return {name: field[first:last] for name, field in batch.items()} if whole else batch

    def _item(self, index: int) -> Any:
        item = self._reads.call(partial(operator.getitem, self.task.dataset, index), 0, index)
        return filled(self.task.name, self.task.absent, item)


class StreamInOrder:
    """A stream, read whole by this process; what it draws is the same in every evaluation."""

    def __init__(self, task: Task | FlowTask, seed: int) -> None:
        """`task`: with the dataset that it is evaluated on as its own."""
        self._task = task
        self._seed = seed

    def batches(self) -> Iterator[ReadBatch]:
        """See `Pass`."""
        for batch in stream_batches(self._task, self._seed):
            yield _Held(batch)

    def first(self) -> ReadBatch | None:
        """See `Pass`."""
        return next(self.batches(), None)


def stream_batches(task: Task | FlowTask, seed: int) -> Iterator[dict[str, Tensor]]:
    """The batches of one pass over a stream; the last has what is left."""
    passing = StreamPass(task, seed, 0, lambda read: read(), keeps_rest=True)
    return (batch.made for batch in passing)


def require_fields(
    task: str, wanted: Mapping[str, ValueSpec], names: Collection[str], batch: Mapping[str, Tensor]
) -> None:
    """Refuse data that are other than what a task is traced with.

    Raises:
        WorkloadError: a field is missing, or has another shape or kind of numbers.
    """
    for name in names:
        if name not in batch:
            raise WorkloadError(
                f"task {task!r}: the dataset to evaluate it on gives no field {name!r}",
                hint="Its items need the fields of the dataset that the task is trained on.",
            )
        spec, field = wanted[name], batch[name]
        shape = tuple(field.shape[1:])
        if shape != spec.shape[1:] or field.is_floating_point() != spec.dtype.is_floating_point:
            raise WorkloadError(
                f"task {task!r}: field {name!r} of the dataset to evaluate it on has shape {shape} and dtype "
                f"{field.dtype} for a sample; it is trained on {spec.shape[1:]} and {spec.dtype}",
                hint="Pad, crop or convert it to what the task is trained on.",
            )


class _Numbered:
    """A batch of a map-style dataset."""

    def __init__(self, data: InOrder, number: int) -> None:
        self._data, self._number = data, number
        self.size = data.size(number)
        self._whole: dict[str, Tensor] | None = None

    def rows(self, first: int, last: int, fields: Collection[str]) -> Mapping[str, Tensor]:
        """See `ReadBatch`."""
        if self._data.reads_whole:
            tensors = {name: field[first:last] for name, field in self._read().items()}
        else:
            tensors = self._data.rows(self._number, first, last)
        return {name: tensors[name] for name in fields if name in tensors}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `ReadBatch`."""
        return shapes_of(self._read())

    def _read(self) -> dict[str, Tensor]:
        if self._whole is None:
            self._whole = self._data.rows(self._number, 0, self.size)
        return self._whole


class _Held:
    """A batch whose fields are in memory."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        self._batch = batch
        self.size = min((len(field) for field in batch.values()), default=0)

    def rows(self, first: int, last: int, fields: Collection[str]) -> Mapping[str, Tensor]:
        """See `ReadBatch`."""
        return {name: self._batch[name][first:last] for name in fields if name in self._batch}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `ReadBatch`."""
        return shapes_of(self._batch)


def shapes_of(batch: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of one sample of each field."""
    return {name: tuple(field.shape[1:]) for name, field in batch.items()}
