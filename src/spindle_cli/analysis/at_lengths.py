"""A task's ops and values for batches of another length than the planned one.

Whatever a trace has of a length (sizes in views, positions, masks, what `if` has decided by it) is that of
the batch it was traced with. So every length is traced by itself, on another build of the workload without
parameters: what runs is what the user's forward does at this length. The ops have to be the same ones, with
the same values between them, since the plan says where these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn

from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.analysis.metaops.finding import Finder
from spindle_cli.analysis.metaops.task import analyse_task
from spindle_cli.analysis.outside import heard
from spindle_cli.errors import WorkloadError
from spindle_cli.training.items import generators_kept
from spindle_cli.workload.graph import CONSTANT, Op, TaskGraph, WorkloadGraph
from spindle_cli.workload.types import Workload

Shape = tuple[int, ...]  # of one sample


@dataclass(frozen=True)
class TaskAtLength:
    """A task as it is at one length.

    `abstract`: over modules of another build. `constants`: tensors that its forward has made while it was
    traced, by the names that the ops' graphs have for them.
    """

    abstract: TaskGraph
    constants: dict[str, Tensor]

    def over(self, planned: TaskGraph) -> TaskGraph:
        """Put this task over the modules of the planned task; they have none of the constants."""
        return replace(self.abstract, task=planned.task, root=planned.root, varying=planned.varying)

    def forget(self) -> None:
        """Take the constants from the other build, which would keep those of every length."""
        for name in self.constants:
            delattr(self.abstract.root, name)


class LengthTracer:
    """Traces tasks of a workload at other lengths."""

    def __init__(self, workload: Workload, planned: WorkloadGraph, memo: AnalysisMemo | None = None) -> None:
        """`workload`: another build of that which `planned` is the graph of; it is changed by nothing.
        `memo`: what was found of it.
        """
        self._workload = workload
        self._planned = planned
        self._finder = Finder(memo)

    def at(self, name: str, shapes: Mapping[str, Shape]) -> TaskAtLength:
        """A task for batches with these shapes of one sample, by field; of others the planned ones.

        Raises:
            WorkloadError: it cannot be traced, or has other ops or values at this length.
        """
        planned = self._planned.tasks[name]
        task = next(task for task in self._workload.tasks if task.name == name)
        with generators_kept(), heard():
            traced = analyse_task(task, self._workload, self._finder, shapes=shapes, like=planned)
        require_same_ops(planned, traced, shapes)
        return TaskAtLength(traced, traced.constants)


def module_over(graph: fx.Graph, constants: Mapping[str, Tensor], *holders: nn.Module) -> fx.GraphModule:
    """A graph over modules and tensors that are there already: the constants, and what the first of the
    holders has that has something of this name.
    """
    held: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            target = str(node.target)
            held[target] = constants[target] if target in constants else _attribute(target, holders)
    return fx.GraphModule(held, graph)


def is_same_graph(first: fx.Graph, second: fx.Graph) -> bool:
    """Whether two graphs of the same names compute the same, whatever the length; never where they have
    constants of their own.
    """
    return str(first) == str(second) and CONSTANT not in str(first)


def _attribute(target: str, holders: tuple[nn.Module, ...]) -> Any:
    for holder in holders:
        value: Any = holder
        try:
            for part in target.split("."):
                value = getattr(value, part)
        except AttributeError:
            continue
        return value
    raise AttributeError(f"nothing has {target}")


def require_same_ops(planned: TaskGraph, at_length: TaskGraph, shapes: Mapping[str, Shape]) -> None:
    """Refuse a task that differs at another length from the one that is planned.

    Raises:
        WorkloadError: the task has other ops or values at this length.
    """
    what = _difference(planned, at_length)
    if what is not None:
        shown = ", ".join(f"{name} of {shape}" for name, shape in shapes.items())
        raise WorkloadError(
            f"task {planned.task.name!r}: for samples with {shown} "
            f"its forward is another than for those that it is planned for: {what}",
            hint="Let forward do the same at every length, or pad to one length; very short batches may also "
            "be left out in `collate`.",
        )


def way_through(graph: TaskGraph) -> list[str]:
    """The operators that a task runs, in order, as messages name them."""
    return [op.target or "its loss" for op in graph.ops]


def _difference(planned: TaskGraph, at_length: TaskGraph) -> str | None:
    """Say in what a task at another length differs from the planned one; None: in lengths alone."""
    before, now = way_through(planned), way_through(at_length)
    if before != now:
        return f"it runs {', '.join(now)} in place of {', '.join(before)}"
    moves = [[(move.slow, move.fast, move.decay) for move in graph.moves] for graph in (planned, at_length)]
    if moves[0] != moves[1]:
        return "it moves parameters in another way"
    for ops in zip(planned.ops, at_length.ops, strict=True):
        if (what := _difference_of_ops(*ops)) is not None:
            return what
    for value, spec in planned.values.items():
        new_spec = at_length.values[value]
        if (spec.dtype, spec.batch_dim, spec.requires_grad, len(spec.shape)) != (
            new_spec.dtype,
            new_spec.batch_dim,
            new_spec.requires_grad,
            len(new_spec.shape),
        ):
            return f"the value {value} is {new_spec.dtype} {new_spec.shape} and was {spec.dtype} {spec.shape}"
    return None


def _difference_of_ops(before: Op, now: Op) -> str | None:
    name = now.target or "its loss"
    if _outside(before) != _outside(now):
        return f"{name} takes or gives other values"
    if (before.coupled, before.talks) != (now.coupled, now.talks):
        why = now.coupled_because or before.coupled_because
        return f"whether {name} may be split over the batch" + (f" ({why})" if why else "")
    if _shares(before) != _shares(now):
        return f"what {name} is a sum or a mean over"
    return None


def _outside(op: Op) -> tuple[Any, ...]:
    return op.fields, op.inputs, op.outputs, op.computed_with, op.buffers, op.batch_norms, op.is_loss


def _shares(op: Op) -> tuple[Any, ...] | None:
    shares = op.shares
    return None if shares is None else (shares.num_counts, shares.count_fields, shares.all_must_count)
