"""Call the modules of a `FlowTask` in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import FlowTask


def modules_of(task: FlowTask) -> tuple[nn.Module, ...]:
    """Every module once, in the order in which the flows name them."""
    found: dict[int, nn.Module] = {}
    for flow in task.flows:
        for end in (flow.producer, flow.consumer):
            if isinstance(end, nn.Module):
                found.setdefault(id(end), end)
    return tuple(found.values())


def run_flow(task: FlowTask, batch: Mapping[str, Tensor]) -> Any:
    """The output of the one module that no other consumes, each module called once.

    Raises:
        WorkloadError: there is no such module, or several.
    """
    consumed = {id(flow.producer) for flow in task.flows if isinstance(flow.producer, nn.Module)}
    ends = [module for module in modules_of(task) if id(module) not in consumed]
    if len(ends) != 1:
        names = ", ".join(type(module).__name__ for module in ends) or "none"
        raise WorkloadError(f"task {task.name!r}: expected one module that no other consumes, found {names}")
    return _output(task, ends[0], batch, {})


def _output(task: FlowTask, module: nn.Module, batch: Mapping[str, Tensor], known: dict[int, Any]) -> Any:
    """A module's output, after those of its producers; `known` holds outputs by the module's id."""
    if id(module) in known:
        return known[id(module)]
    positional: list[Any] = []
    by_name: dict[str, Any] = {}
    for flow in task.flows:
        if flow.consumer is not module:
            continue
        producer = flow.producer
        value = batch[producer] if isinstance(producer, str) else _output(task, producer, batch, known)
        if flow.argument is None:
            positional.append(value)
        else:
            by_name[flow.argument] = value
    known[id(module)] = module(*positional, **by_name)
    return known[id(module)]
