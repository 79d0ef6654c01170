"""A traced workload's graph for another build of it, without tracing again."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from spindle_cli.workload.graph import TaskGraph, WorkloadGraph
from spindle_cli.workload.metaops.cut import names_used
from spindle_cli.workload.tracing.flow import flow_graph
from spindle_cli.workload.types import FlowTask, Task, Workload


def rebind(graph: WorkloadGraph, workload: Workload) -> WorkloadGraph | None:
    """What `analyse(workload)` gives, where `graph` is of the same workload built another time.

    None where the builds differ: a name that an op uses is not there, or stands for something else. (A graph
    names what it uses, and holds none of it.)
    """
    tasks: dict[str, TaskGraph] = {}
    for task in workload.tasks:
        known = graph.tasks.get(task.name)
        if known is None or type(known.task) is not type(task):
            return None
        root = _root_of(task, known)
        if not _has_what_is_used(root, known):
            return None
        tasks[task.name] = replace(known, task=task, root=root)
    if list(tasks) != list(graph.tasks):
        return None
    return replace(graph, workload=workload, tasks=tasks)


def _root_of(task: Task | FlowTask, known: TaskGraph) -> nn.Module:
    return flow_graph(task, tuple(known.fields)).root if isinstance(task, FlowTask) else task.module


def _has_what_is_used(root: nn.Module, known: TaskGraph) -> bool:
    try:
        return all(names_used(root, op.graph) == (op.parameters, op.buffers) for op in known.ops)
    except AttributeError:  # torch's for a name that is not there
        return False
