"""Where a forward reads a number that changes from step to step: an attribute, an entry of a dict or list, a
name of a Python module, or an argument of the task's forward that no field gives.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.files.parsing import shown

_WAYS = (
    "The name of an attribute, dotted from the task's module ('beta', 'decoder.temperature'), with * for "
    "several ('*.dropout.p'); the name of an argument of its forward; or 'package.module:NAME', "
    "'package.module:CONFIG.beta'."
)
# Where a task's module holds the numbers that are arguments of its forward.
_ARGUMENTS = "_spindle_arguments"


@dataclass(frozen=True, eq=False)
class Place:
    """A number that code reads as `holder.key`, or `holder[key]` of a dict or list."""

    holder: Any
    key: Any

    def get(self) -> Any:
        """What is there."""
        if isinstance(self.holder, MutableMapping | MutableSequence):
            return self.holder[self.key]
        return getattr(self.holder, self.key)

    def put(self, value: Any) -> None:
        """Let it be there, whatever a class of the user's does with what is set."""
        if isinstance(self.holder, MutableMapping | MutableSequence):
            self.holder[self.key] = value
        elif isinstance(self.holder, type):
            setattr(self.holder, self.key, value)
        else:
            object.__setattr__(self.holder, self.key, value)

    def is_same(self, other: Place) -> bool:
        """Whether both are one place."""
        return self.holder is other.holder and bool(self.key == other.key)


def find_places(path: str, root: nn.Module, where: str) -> tuple[Place, ...]:
    """The places that a path names.

    Args:
        root: of the task.
        where: begins messages.

    Raises:
        WorkloadError: there is no such place, or no number in it.
    """
    if ":" in path:
        name, _, inside = path.partition(":")
        found = [_walk(_module(name, where), inside.split("."), path, where)]
    elif "*" in path:
        found = list(_matching(path, root))
        if not found:
            raise WorkloadError(f"{where}: no module has a number by {shown(path)}", hint=_WAYS)
    elif path in _parameters(root) and not hasattr(root, path):
        found = [_argument(path, root, where)]
    else:
        found = [_walk(root, path.split("."), path, where)]
    for place in found:
        _require_number(place, path, where)
    return tuple(found)


def arguments_of_step(root: nn.Module) -> Mapping[str, Any]:
    """What forward of a task's module is given beside its fields: numbers of the step, by name."""
    found: Mapping[str, Any] = vars(root).get(_ARGUMENTS, {})
    return found


def _argument(name: str, root: nn.Module, where: str) -> Place:
    """An argument of forward, which has its default at first."""
    default = _parameters(root)[name].default
    if not is_number(default):
        raise WorkloadError(
            f"{where}: {shown(name)} is an argument of {type(root).__name__}.forward, without a number to "
            "begin with",
            hint=f"Give it one, as in `def forward(self, ..., {name}=0.0)`.",
        )
    held: dict[str, Any] = vars(root).setdefault(_ARGUMENTS, {})
    held.setdefault(name, default)
    return Place(held, name)


def _parameters(root: nn.Module) -> Mapping[str, inspect.Parameter]:
    parameters = list(inspect.signature(type(root).forward).parameters.values())[1:]
    return {
        each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }


def _module(name: str, where: str) -> Any:
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except Exception as error:  # code of the user's
        raise WorkloadError(
            f"{where}: there is no module {shown(name)}: {type(error).__name__}: {error}", hint=_WAYS
        ) from error


def _walk(start: Any, parts: list[str], path: str, where: str) -> Place:
    holder = start
    for part in parts[:-1]:
        try:
            holder = _inside(holder, part)
        except (AttributeError, LookupError, ValueError) as error:
            raise _missing(holder, part, path, where) from error
    key: Any = parts[-1]
    if isinstance(holder, MutableSequence) and not isinstance(holder, nn.Module) and key.isdigit():
        key = int(key)
    place = Place(holder, key)
    try:
        place.get()
    except (AttributeError, LookupError, TypeError) as error:
        raise _missing(holder, key, path, where) from error
    return place


def _inside(holder: Any, part: str) -> Any:
    if isinstance(holder, Mapping):
        return holder[part]
    if isinstance(holder, list | tuple):
        return holder[int(part)]
    return getattr(holder, part)


def _missing(holder: Any, part: Any, path: str, where: str) -> WorkloadError:
    what = getattr(holder, "__name__", type(holder).__name__)
    return WorkloadError(f"{where}: {shown(path)}: {what} has no {shown(part)}", hint=_WAYS)


def _matching(pattern: str, root: nn.Module) -> Iterator[Place]:
    for name, module in root.named_modules():
        for key, value in module.__dict__.items():
            if is_number(value) and fnmatchcase(f"{name}.{key}" if name else key, pattern):
                yield Place(module, key)


def is_number(value: Any) -> bool:
    """Whether something is a number of Python's."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_number(place: Place, path: str, where: str) -> None:
    holder, value = place.holder, place.get()
    if isinstance(getattr(type(holder), str(place.key), None), property):
        raise WorkloadError(
            f"{where}: {shown(path)} is a property of {type(holder).__name__}",
            hint="Name the attribute that it returns.",
        )
    if isinstance(value, Tensor):
        raise WorkloadError(
            f"{where}: {shown(path)} is a tensor, expected a number",
            hint="Let the module hold it as a number (self.beta = 0.0), no buffer or parameter.",
        )
    if not is_number(value):
        raise WorkloadError(
            f"{where}: {shown(path)} is {value!r:.80}, expected a number to begin with, as 0.0"
        )
