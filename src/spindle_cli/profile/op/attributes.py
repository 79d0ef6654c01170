"""Tensors that modules hold as plain attributes: no parameters or buffers, and in memory all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def attribute_bytes(module: nn.Module) -> int:
    """Bytes of the tensors that are attributes of a module or of those in it, also in lists and dicts of its
    own; each tensor once, parameters and buffers not.
    """
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    found = {
        id(tensor): tensor
        for part in module.modules()
        for name, value in part.__dict__.items()
        if name not in ("_parameters", "_buffers", "_modules")
        for tensor in _tensors(value)
        if id(tensor) not in known
    }
    return sum(tensor.numel() * tensor.itemsize for tensor in found.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from (item for item in value if isinstance(item, Tensor))
    elif isinstance(value, dict):
        yield from (item for item in value.values() if isinstance(item, Tensor))
