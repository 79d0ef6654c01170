"""The module that the names of a task's parameters start from."""

from __future__ import annotations

import re

from torch import nn

from spindle_cli.workload.types import FlowTask, Task


def root_of(task: Task | FlowTask) -> nn.Module:
    """A task's module; of a `FlowTask` one that holds all of its modules."""
    if isinstance(task, Task):
        return task.module
    root = nn.Module()
    for module, name in flow_modules(task).items():
        root.add_module(name, module)
    return root


def flow_modules(task: FlowTask) -> dict[nn.Module, str]:
    """Each module once, in the order in which the flows name them: 'vision', 'vision_2', ..."""
    names: dict[nn.Module, str] = {}
    for flow in task.flows:
        for end in (flow.producer, flow.consumer):
            if isinstance(end, nn.Module) and end not in names:
                base = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(end).__name__).lower()
                taken = sum(
                    name == base or re.fullmatch(rf"{base}_\d+", name) is not None for name in names.values()
                )
                names[end] = base if taken == 0 else f"{base}_{taken + 1}"
    return names
