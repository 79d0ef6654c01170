"""Repeated blocks: modules of one class that a model holds several equal ones of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn

from spindle_cli.init.model import import_path
from spindle_cli.init.types import Block

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(models: Mapping[str, nn.Module]) -> tuple[Block, ...]:
    """The outermost classes of which some list of modules in the models holds two equal ones or more.

    Equal: of the same class, with parameters of the same names and shapes. Only modules that hold others
    count: a layer of a transformer does, its linear maps do not. In a chain of stages of other widths the
    stages' layers are found, not the stages.
    """
    found: dict[type[nn.Module], list[tuple[str, nn.Module]]] = {}
    for task, model in models.items():
        classes = _repeated_classes(model)
        for name, module in _outermost(model, classes, task):
            found.setdefault(type(module), []).append((name, module))
    return tuple(_as_block(cls, modules) for cls, modules in found.items() if import_path(cls))


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
    for own, child in module.named_children():
        yield from _outermost(child, classes, f"{name}.{own}")


def shape_of(module: nn.Module) -> tuple[object, ...]:
    """What equal modules share: their class, and the names and shapes of their parameters."""
    parameters = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return type(module), parameters


def _as_block(cls: type[nn.Module], modules: list[tuple[str, nn.Module]]) -> Block:
    distinct = {id(module): module for _, module in modules}
    parameters = {id(p): p.numel() for module in distinct.values() for p in module.parameters()}
    path = import_path(cls)
    assert path is not None
    return Block(
        module=path[0],
        name=path[1],
        count=len(distinct),
        equal=max(Counter(shape_of(module) for module in distinct.values()).values()),
        first=modules[0][0],
        parameters=sum(parameters.values()),
    )
