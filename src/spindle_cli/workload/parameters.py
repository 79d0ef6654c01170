"""Every distinct parameter and buffer of a workload under one name, the user's own: dotted, from the module
that the names of a task's parameters start from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from spindle_cli.workload.graph import TaskGraph, WorkloadGraph
from spindle_cli.workload.types import FlowTask, Task


@dataclass(frozen=True)
class ParameterTable:
    """Canonical names of parameters and buffers: '<first task that has it>.<dotted name in that task's
    module>'.

    Attributes:
        parameters, buffers: canonical name -> tensor, each distinct tensor once, in the workload's order.
        names: (task, dotted name) -> canonical name, for every name that a tensor has in any task.
        users: canonical name -> (task, op index) of every op that uses it, in order. A parameter of glue can
            belong to ops of several MetaOps: its gradient is the sum over all that are listed here.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    names: dict[tuple[str, str], str]
    users: dict[str, tuple[tuple[str, int], ...]]

    @classmethod
    def of(cls, graph: WorkloadGraph) -> ParameterTable:
        """Return the table of an analysed workload."""
        return cls.of_tasks(graph.tasks)

    @classmethod
    def of_tasks(cls, tasks: Mapping[str, TaskGraph]) -> ParameterTable:
        """Return the table of some traced tasks."""
        canonical: dict[int, str] = {}
        names: dict[tuple[str, str], str] = {}
        parameters: dict[str, nn.Parameter] = {}
        buffers: dict[str, Tensor] = {}
        for task, root in ((task.task.name, task.root) for task in tasks.values()):
            for name, tensor in _named_tensors(root):
                first_name = canonical.setdefault(id(tensor), f"{task}.{name}")
                names[task, name] = first_name
                if isinstance(tensor, nn.Parameter):
                    parameters.setdefault(first_name, tensor)
                else:
                    buffers.setdefault(first_name, tensor)
        users: dict[str, list[tuple[str, int]]] = {name: [] for name in (*parameters, *buffers)}
        for task_name, task_graph in tasks.items():
            for op in task_graph.ops:
                for name in (*op.parameters, *op.buffers):
                    users[names[task_name, name]].append((task_name, op.index))
        return cls(parameters, buffers, names, {name: tuple(used) for name, used in users.items()})

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Canonical name -> the other names of the same tensor; of those that have others."""
        aliases: dict[str, dict[str, None]] = {}
        for (task, dotted), canonical in self.names.items():
            if (name := f"{task}.{dotted}") != canonical:
                aliases.setdefault(canonical, {})[name] = None
        return {canonical: tuple(names) for canonical, names in aliases.items()}

    def of_op(self, task: str, names: tuple[str, ...]) -> tuple[str, ...]:
        """Canonical names for an op's `parameters` or `buffers`."""
        return tuple(self.names[task, name] for name in names)

    def is_trainable(self, name: str) -> bool:
        """Whether a parameter takes a gradient."""
        return self.parameters[name].requires_grad

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or buffer."""
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    def num_bytes(self, name: str) -> int:
        """Bytes of a parameter or buffer."""
        tensor = self.tensor(name)
        return tensor.numel() * tensor.element_size()


def _named_tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)


def root_of(task: Task | FlowTask) -> nn.Module:
    """Return a task's module; for a `FlowTask`, one that holds all of its modules."""
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
