"""A workload's tasks as an evaluation runs them: traced with all modules in eval mode, ops giving what
forward returns beside the loss.
"""

from __future__ import annotations

from dataclasses import replace

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.analyse import analyse_task
from spindle_cli.workload.building.abstract import load_abstract
from spindle_cli.workload.graph import TaskGraph, WorkloadGraph
from spindle_cli.workload.splitting.independence import Independence
from spindle_cli.workload.tracing.observe import Observer

_FROM_ONE = (
    "Compute what forward returns beside the loss from one operator's output, or from what the loss takes."
)


def analyse_evaluation(source: str, graph: WorkloadGraph, name: str) -> TaskGraph:
    """A task of the workload at `source` as it is evaluated, over the modules of `graph`, of another build.

    Random numbers are drawn; generators are the caller's.

    Raises:
        WorkloadError: forward takes another way through its operators in eval mode, or cannot be traced.
    """
    workload = load_abstract(source).workload
    task = next(task for task in workload.tasks if task.name == name)
    trained = graph.tasks[name]
    modules = [task.module] if hasattr(task, "module") else [flow.consumer for flow in task.flows]
    for module in modules:
        module.eval()
    observer = Observer(None)
    keeps = bool(trained.task.metrics)
    found = analyse_task(task, workload, observer, Independence(observer), keeps_results=keeps)
    _require_same_way(trained, found)
    return replace(found, task=trained.task, root=trained.root)


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
