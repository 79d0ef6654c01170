"""A traced workload's graph for another build of it, without tracing again."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from spindle_cli.workload.evaluated.trace import evaluated_on_its_own
from spindle_cli.workload.graph import CONSTANT, TaskGraph, WorkloadGraph
from spindle_cli.workload.metaops.cut import names_used
from spindle_cli.workload.tracing.builds import NoTwinError, Twins
from spindle_cli.workload.tracing.flow import flow_graph
from spindle_cli.workload.tracing.modes import give_modes
from spindle_cli.workload.tracing.regions import NAME, Region
from spindle_cli.workload.types import FlowTask, Task, Workload


def rebind(graph: WorkloadGraph, workload: Workload) -> WorkloadGraph | None:
    """What `analyse(workload)` gives, where `graph` is of the same workload built another time.

    None where the builds differ: a name that an op uses is not there, or stands for something else. (A graph
    names what it uses, and holds none of it.)
    """
    if [task.name for task in workload.tasks] != list(graph.tasks):
        return None
    tasks = {task.name: _rebound(graph.tasks[task.name], task) for task in workload.tasks}
    given = {task.name: task for task in (*workload.tasks, *map(evaluated_on_its_own, workload.evaluated))}
    if not graph.evaluations.keys() <= given.keys():
        return None
    evaluations = {name: _rebound(known, given[name]) for name, known in graph.evaluations.items()}
    found = {name: task for name, task in tasks.items() if task is not None}
    evaluated = {name: task for name, task in evaluations.items() if task is not None}
    if len(found) + len(evaluated) < len(tasks) + len(evaluations):
        return None
    for task in found.values():
        give_modes(task.root, task.modes)
    return replace(graph, workload=workload, tasks=found, evaluations=evaluated)


def _rebound(known: TaskGraph, task: Task | FlowTask) -> TaskGraph | None:
    if type(known.task) is not type(task):
        return None
    root = _root_of(task, known)
    try:
        _hand_on(known, root)
    except NoTwinError:
        return None
    return replace(known, task=task, root=root) if _has_what_is_used(root, known) else None


def _hand_on(known: TaskGraph, root: nn.Module) -> None:
    """Let a root hold what the trace has left on the other build's: tensors that forward has made of numbers,
    and regions, over the modules of its own.

    Raises:
        NoTwinError: a region uses something of which nothing is known in this build.
    """
    left = {
        name: getattr(known.root, name)
        for op in known.ops
        for graph in op.graphs
        for node in graph.nodes
        if node.op in ("get_attr", "call_module") and (name := str(node.target)).startswith((CONSTANT, NAME))
    }
    twins = Twins(known.root, root) if left else None
    for name, value in left.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise NoTwinError
        vars(root)[name] = value.over(twins) if isinstance(value, Region) and twins else value


def _root_of(task: Task | FlowTask, known: TaskGraph) -> nn.Module:
    return flow_graph(task, tuple(known.fields)).root if isinstance(task, FlowTask) else task.module


def _has_what_is_used(root: nn.Module, known: TaskGraph) -> bool:
    try:
        return all(names_used(root, op.graph) == (op.computed_with, op.buffers) for op in known.ops)
    except AttributeError:  # torch's for a name that is not there
        return False
