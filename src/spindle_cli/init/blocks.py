"""Repeated blocks of models, to be listed as operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

from spindle_cli.init.model import import_path
from spindle_cli.init.types import Block
from spindle_cli.workload.metaops.repeated import repeated_modules, shape_of


def repeated_blocks(models: Mapping[str, nn.Module]) -> tuple[Block, ...]:
    """The outermost classes of which some list of modules in the models holds two equal ones or more."""
    found: dict[type[nn.Module], list[tuple[str, nn.Module]]] = {}
    for task, model in models.items():
        for name, module in repeated_modules(model, task):
            found.setdefault(type(module), []).append((name, module))
    return tuple(_as_block(cls, modules) for cls, modules in found.items() if import_path(cls))


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
