"""A `FlowTask` as the graph that tracing would give: every module one operator, in an order in which
producers come first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.graph import flow_modules, root_of
from spindle_cli.workload.types import Flow, FlowTask


@dataclass(frozen=True)
class FlowGraph:
    """`root` holds the task's modules, each under a name made of its class; `graph` calls them."""

    root: nn.Module
    graph: fx.Graph


def flow_graph(task: FlowTask, fields: Collection[str]) -> FlowGraph:
    """The graph of a task that was given by `add_flow`.

    Args:
        fields: names of the batch's fields.

    Raises:
        WorkloadError: no flows, an unknown field, an end that is no module, a cycle, or not exactly one last
            module.
    """
    _check_flows(task, fields)
    names = flow_modules(task)
    root = root_of(task)
    graph = fx.Graph()
    values: dict[nn.Module | str, Any] = {field: graph.placeholder(field) for field in fields}
    for module in _in_order(task, names):
        values[module] = _call(task, graph, module, names[module], values)
    graph.output(values[_last(task, names)])
    return FlowGraph(root, graph)


def _check_flows(task: FlowTask, fields: Collection[str]) -> None:
    if not task.flows:
        raise WorkloadError(
            f"task {task.name!r}: it has no flows", hint="Add them with task.add_flow(producer, consumer)."
        )
    for flow in task.flows:
        if not isinstance(flow.consumer, nn.Module):
            raise WorkloadError(
                f"task {task.name!r}: a flow leads to {flow.consumer!r}, expected an nn.Module"
            )
        if isinstance(flow.producer, nn.Module):
            continue
        if flow.producer not in fields:
            raise WorkloadError(
                f"task {task.name!r}: a flow comes from {flow.producer!r}, "
                "which is neither a module nor a field of the batch",
                hint=f"The dataset's items have {', '.join(map(repr, fields)) or 'no fields'}.",
            )


def _in_order(task: FlowTask, names: Mapping[nn.Module, str]) -> list[nn.Module]:
    """The modules, producers first, otherwise as the flows name them."""
    done: dict[nn.Module, None] = {}
    waiting = list(names)
    while waiting:
        ready = [
            module for module in waiting if all(flow.producer in done for flow in _module_flows(task, module))
        ]
        if not ready:
            stuck = ", ".join(names[module] for module in waiting)
            raise WorkloadError(f"task {task.name!r}: the flows form a cycle among {stuck}")
        done.update(dict.fromkeys(ready))
        waiting = [module for module in waiting if module not in done]
    return list(done)


def _module_flows(task: FlowTask, consumer: nn.Module) -> list[Flow]:
    return [flow for flow in task.flows if flow.consumer is consumer and isinstance(flow.producer, nn.Module)]


def _last(task: FlowTask, names: Mapping[nn.Module, str]) -> nn.Module:
    producers = {flow.producer for flow in task.flows if isinstance(flow.producer, nn.Module)}
    ends = [module for module in names if module not in producers]
    if len(ends) != 1:
        shown = ", ".join(names[module] for module in ends) or "none"
        raise WorkloadError(
            f"task {task.name!r}: expected one module whose output no other consumes (it returns the loss), "
            f"found {shown}"
        )
    return ends[0]


def _call(
    task: FlowTask, graph: fx.Graph, module: nn.Module, name: str, values: Mapping[nn.Module | str, Any]
) -> fx.Node:
    """Call a module with what flows into it; an nn.Sequential as the chain of its children."""
    flows = [flow for flow in task.flows if flow.consumer is module]
    positional = tuple(values[flow.producer] for flow in flows if flow.argument is None)
    named = {flow.argument: values[flow.producer] for flow in flows if flow.argument is not None}
    if not isinstance(module, nn.Sequential) or len(module) == 0:
        return graph.call_module(name, positional, named)
    if len(positional) != 1 or named:
        raise WorkloadError(
            f"task {task.name!r}: {name!r} is an nn.Sequential, which takes one positional input, "
            f"found {len(positional)} and {len(named)} by name"
        )
    return _chain(graph, module, name, positional[0])


def _chain(graph: fx.Graph, module: nn.Sequential, name: str, value: fx.Node) -> fx.Node:
    for key, child in module.named_children():
        path = f"{name}.{key}"
        if isinstance(child, nn.Sequential) and len(child) > 0:
            value = _chain(graph, child, path, value)
        else:
            value = graph.call_module(path, (value,))
    return value
