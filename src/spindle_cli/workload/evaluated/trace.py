"""A workload's tasks as an evaluation runs them, at the planned length and at others: traced with all modules
in eval mode, ops giving what forward returns beside the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.at_lengths.trace import require_same_ops
from spindle_cli.workload.building.abstract import load_abstract
from spindle_cli.workload.graph import TaskGraph, WorkloadGraph
from spindle_cli.workload.memo import AnalysisMemo
from spindle_cli.workload.metaops.constants import hand_constants_on
from spindle_cli.workload.metaops.finding import Finder
from spindle_cli.workload.metaops.sharing import still_buffers, tensors_of
from spindle_cli.workload.metaops.task import analyse_task
from spindle_cli.workload.parameters import root_of
from spindle_cli.workload.refuse import refusal
from spindle_cli.workload.splitting.moved_parameters import refuse_shared_moves
from spindle_cli.workload.training.item_draws import generators_kept
from spindle_cli.workload.types import FlowTask, Task, Workload

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
    found = _traced(task, workload, Finder(), trained)
    hand_constants_on(found, trained.root)
    return replace(found, task=trained.task, root=trained.root)


def evaluated_on_its_own(task: Task | FlowTask) -> Task | FlowTask:
    """A task that is only evaluated, with the dataset for that as its own."""
    return replace(task, dataset=task.eval_dataset)


def _traced(
    task: Task | FlowTask, workload: Workload, finder: Finder, trained: TaskGraph | None
) -> TaskGraph:
    with in_eval_mode(task):
        shapes = {field: trained.fields[field].shape[1:] for field in trained.varying} if trained else {}
        results = bool(task.metrics)
        found = analyse_task(task, workload, finder, keeps_results=results, shapes=shapes, like=trained)
    refuse_shared_moves({task.name: found})
    if found.moves:
        raise refusal(
            task.name,
            f"forward moves {found.moves[0].slow!r} in eval mode too, so that to evaluate would change what "
            "is trained",
            found.moves[0].place,
            "Move it in training alone: `if self.training:`.",
        )
    if trained is None:
        return replace(found, varying=_padded(task, found))
    _require_same_way(trained, found)
    return replace(found, varying=trained.varying)


def _padded(task: Task | FlowTask, found: TaskGraph) -> dict[str, tuple[bool, ...]]:
    """What may differ from batch to batch of a task that is only evaluated, of whose batches none was looked
    at: all sizes that a collate of its own makes.
    """
    if task.collate is None:
        return {}
    return {name: (True,) * len(spec.shape[1:]) for name, spec in found.fields.items() if spec.shape[1:]}


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


def _require_same_way(trained: TaskGraph, found: TaskGraph) -> None:
    name = trained.task.name
    ways = [[op.target or "its loss" for op in graph.ops] for graph in (trained, found)]
    if ways[0] != ways[1]:
        one, other = (", ".join(way) for way in ways)
        raise WorkloadError(
            f"task {name!r}: its forward in eval mode takes another way through its operators: {other}; "
            f"in training it takes {one}",
            hint="Let forward call the same operators in both. " + _FROM_ONE,
        )
    still = still_buffers(trained, found.root)
    for before, now in zip(trained.ops, found.ops, strict=True):
        known = {trained.producer[value] for value in before.inputs}
        new = {found.producer[value] for value in now.inputs} - known
        if new:
            source = found.ops[min(new)].target
            raise WorkloadError(
                f"task {name!r}: in eval mode {now.target or 'its loss'} takes what {source} gives, which it "
                "does not in training",
                hint=_FROM_ONE,
            )
        held = still.union(id(tensor) for _, tensor in tensors_of(found.root, before))
        strange = [
            tensor_name for tensor_name, tensor in tensors_of(found.root, now) if id(tensor) not in held
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
            found = analyse_task(
                task,
                self._workload,
                self._finder,
                keeps_results=bool(task.metrics),
                shapes=shapes,
                like=planned,
            )
        require_same_ops(planned, found, shapes)
        _require_same_results(planned, found)
        return found


def _require_same_results(planned: TaskGraph, found: TaskGraph) -> None:
    """Refuse results that make no one tensor of all samples."""
    for key, spec in planned.results.items():
        other = found.results.get(key)
        if other is None or (other.shape, other.dtype, other.batch_dim) != (
            spec.shape,
            spec.dtype,
            spec.batch_dim,
        ):
            shown = "none" if other is None else f"{other.dtype} {other.shape}"
            raise WorkloadError(
                f"task {planned.task.name!r}: metrics are given one tensor with {key!r} of all samples, "
                f"and for batches of different lengths forward gives {spec.dtype} {spec.shape} and {shown}",
                hint="Let forward return what has one size at every length, as sums over the length.",
            )
