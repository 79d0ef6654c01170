"""Repeated blocks: modules of one class that a model holds several equal ones of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from spindle_cli.workload.graph import TaskGraph, WorkloadGraph
from spindle_cli.workload.types import Task

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_modules(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """With their dotted names behind `name`, the modules of the outermost classes of which some list of
    modules in a model holds two equal ones or more.

    Equal: of the same class, with parameters of the same names and shapes. Only modules that hold others
    count: a layer of a transformer does, its linear maps do not. In a chain of stages of other widths the
    stages' layers are found, not the stages.
    """
    yield from _outermost(model, _repeated_classes(model), name)


def unlisted_layers(graph: WorkloadGraph) -> Iterator[str]:
    """A line for each task that is one op as no class that it holds is an operator, although it has repeated
    blocks: which class to list.
    """
    for name, made in graph.tasks.items():
        # What a FlowTask calls is an operator, whatever is listed.
        if isinstance(made.task, Task) and not _holds_operators(made, graph):
            distinct = {id(module): module for _, module in repeated_modules(made.root, name)}
            counts = Counter(type(module) for module in distinct.values())
            for cls, count in counts.most_common(1):
                yield (
                    f"{name}: all of it is one op, which no plan can take apart, as `operators` lists no "
                    f"class that it holds: list {cls.__name__}, of which it has {count}"
                )


def shape_of(module: nn.Module) -> tuple[object, ...]:
    """What equal modules share: their class, and the names and shapes of their parameters."""
    parameters = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return type(module), parameters


def _holds_operators(made: TaskGraph, graph: WorkloadGraph) -> bool:
    return any(isinstance(module, graph.workload.operator_classes) for module in made.root.modules())


def _repeated_classes(model: nn.Module) -> set[type[nn.Module]]:
    classes: set[type[nn.Module]] = set()
    for container in model.modules():
        if not isinstance(container, nn.Sequential | nn.ModuleList):
            continue
        counts = Counter(shape_of(child) for child in container if _has_parts(child))
        classes |= {type(child) for child in container if counts[shape_of(child)] > 1}
    return classes


def _has_parts(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS) and any(True for _ in module.children())


def _outermost(
    module: nn.Module, classes: set[type[nn.Module]], name: str
) -> Iterator[tuple[str, nn.Module]]:
    if type(module) in classes:
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, classes, f"{name}.{child_name}")
