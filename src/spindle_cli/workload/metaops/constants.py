"""Tensors that a forward has made of numbers while it was traced: the root of the trace holds them, by names
that torch.fx gives in the order in which it meets them.

Two builds of one workload have the same names of modules, but not of these: a name may stand for another
tensor there.
"""

from __future__ import annotations

from itertools import count

from torch import Tensor, nn

from spindle_cli.workload.graph import CONSTANT, TaskGraph


def constants_of(task: TaskGraph) -> dict[str, Tensor]:
    """Those that a task's ops take, by name."""
    names = {
        str(node.target)
        for op in task.ops
        for graph in op.graphs
        for node in graph.nodes
        if node.op == "get_attr" and str(node.target).startswith(CONSTANT)
    }
    return {name: value for name in names if isinstance(value := getattr(task.root, name), Tensor)}


def hand_constants_on(task: TaskGraph, root: nn.Module) -> tuple[str, ...]:
    """Let another build's root hold a task's constants, too, by names that nothing there has; the task's
    graphs use these from now on. Returns the names.
    """
    renamed: dict[str, str] = {}
    for name, value in constants_of(task).items():
        renamed[name] = next(new for number in count() if not hasattr(root, new := f"{CONSTANT}{number}"))
        setattr(root, renamed[name], value)
    for op in task.ops:
        for graph in op.graphs:
            for node in graph.nodes:
                if node.op == "get_attr":
                    node.target = renamed.get(str(node.target), node.target)
    return tuple(renamed.values())
