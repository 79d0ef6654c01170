"""What stands in another build of a workload for something in the first: its modules, tensors and objects."""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.analysis.tracing.behaviour import is_filled
from spindle_cli.analysis.tracing.shapes import with_items
from spindle_cli.workload.building.attributes import is_of_users_code
from spindle_cli.workload.introspection import fields_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice)
_OF_PYTHON = (types.BuiltinFunctionType, types.ModuleType, type(torch.Tensor.add))
_DEPTH = 6  # of containers and objects that a forward has made itself
_MOST = 10_000  # entries of a container


class NoTwinError(Exception):
    """Nothing in the other build is known to stand for a value."""


class Twins:
    """What stands for what: all that is come to from two modules by the same names."""

    def __init__(self, root: nn.Module, other_root: nn.Module) -> None:
        """`root`: of one build; `other_root`: of another build of the same workload."""
        self._of: dict[int, tuple[Any, Any]] = {}
        waiting: deque[tuple[Any, Any]] = deque([(root, other_root)])
        while waiting:
            original, twin = waiting.popleft()
            if original is twin or type(original) is not type(twin) or isinstance(original, (*_PLAIN, type)):
                continue
            if id(original) in self._of:
                continue
            self._of[id(original)] = original, twin
            if isinstance(original, dict):
                waiting.extend((original[key], twin[key]) for key in original if key in twin)
            elif isinstance(original, list | tuple) and len(original) == len(twin) <= _MOST:
                waiting.extend(zip(original, twin, strict=True))
            fields, twin_fields = fields_of(original), fields_of(twin)
            if fields is not None and twin_fields is not None and not isinstance(original, Tensor):
                waiting.extend(
                    (fields[name], twin_fields[name]) for name in list(fields) if name in twin_fields
                )

    def of(self, value: Any, depth: int = _DEPTH) -> Any:
        """What stands for a value: itself, where no build has a part in it.

        Raises:
            NoTwinError: it is of the first build, or may be, and nothing is known to stand for it.
        """
        if id(value) in self._of:
            return self._of[id(value)][1]
        if isinstance(value, (*_PLAIN, *_OF_PYTHON)) or (isinstance(value, type) and _is_found_again(value)):
            return value
        if depth == 0:
            raise NoTwinError
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta:
            return value  # of numbers
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.of(value.__self__, depth - 1))
        if type(value) is dict:
            return _same_or({key: self.of(item, depth - 1) for key, item in value.items()}, value)
        if isinstance(value, tuple | list) and (type(value) in (tuple, list) or hasattr(value, "_fields")):
            items = [self.of(item, depth - 1) for item in value]
            return _same_or(with_items(value, items), value)
        return self._unless_built(value, depth)

    def _unless_built(self, value: Any, depth: int) -> Any:
        """A function or an object that holds nothing of a build."""
        held: list[Any] = []
        if isinstance(value, types.FunctionType):
            held = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
            held += (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        elif isinstance(value, nn.Module | type | Tensor) or not _shows_what_it_holds(value):
            raise NoTwinError
        held += (fields_of(value) or {}).values()
        if any(self.of(item, depth - 1) is not item for item in held):
            raise NoTwinError
        return value


def _shows_what_it_holds(value: Any) -> bool:
    """Whether an object's fields are all that it holds: not of functools.partial, say, or of a list."""
    cls = type(value)
    return _is_found_again(cls) and is_of_users_code(cls) and not isinstance(value, list | dict | set | deque)


def _is_found_again(cls: type) -> bool:
    """Whether every build has this same class: none is made in a function."""
    return "<locals>" not in cls.__qualname__


def _same_or(made: Any, value: Any) -> Any:
    """The value itself, where what was made of it holds the same."""
    inside = (made.values(), value.values()) if isinstance(value, dict) else (made, value)
    return value if all(item is original for item, original in zip(*inside, strict=True)) else made
