"""Tasks as they are evaluated on batches of other lengths than the planned ones."""

from __future__ import annotations

from collections.abc import Mapping

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.at_lengths.trace import require_same_ops
from spindle_cli.workload.evaluated.trace import evaluated_on_its_own, in_eval_mode
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.memo import AnalysisMemo
from spindle_cli.workload.metaops.finding import Finder
from spindle_cli.workload.metaops.task import analyse_task
from spindle_cli.workload.training.item_draws import generators_kept
from spindle_cli.workload.types import Workload


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
