"""Call the modules of a `FlowTask` in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from spindle_cli.workload.types import FlowTask


def run_flow(task: FlowTask, batch: Mapping[str, Tensor]) -> Any:
    """Return the output of the one module that no other consumes, each module called once with what flows
    into it.

    The flows are followed back from the loss, and not in the order that the workload's analysis gives them.
    """
    consumed = {id(flow.producer) for flow in task.flows}
    last = next(flow.consumer for flow in task.flows if id(flow.consumer) not in consumed)
    return _output(task, last, batch, {})


def _output(task: FlowTask, module: nn.Module, batch: Mapping[str, Tensor], outputs: dict[int, Any]) -> Any:
    """Return a module's output, after those of its producers; `outputs` holds them by the module's id."""
    if id(module) in outputs:
        return outputs[id(module)]
    positional: list[Any] = []
    by_name: dict[str, Any] = {}
    for flow in task.flows:
        if flow.consumer is not module:
            continue
        producer = flow.producer
        value = batch[producer] if isinstance(producer, str) else _output(task, producer, batch, outputs)
        if flow.argument is None:
            positional.append(value)
        else:
            by_name[flow.argument] = value
    outputs[id(module)] = module(*positional, **by_name)
    return outputs[id(module)]
