"""What a module's forward changes in the module itself, and undoing it; what it keeps elsewhere goes, too.

A forward that keeps what it makes, a table of angles or a mask by its length, would have tensors without
values there once it was looked at.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.utils import _pytree as pytree

_PLAIN = (bool, int, float, complex, str, bytes)
_TORCHS = frozenset(vars(nn.Module()))  # its own dicts of parameters, buffers, parts and hooks
_HOOKS = tuple(name for name, held in vars(nn.Module()).items() if "_hooks" in name and held == {})
_DEPTH = 3  # of containers in containers, and in objects
_MOST = 1000  # entries of a container that are looked into
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict)


@dataclass
class Changes:
    """What was changed while looking, as 'self.name' below the module.

    Attributes:
        counted: plain values that are now others, and containers that grew or shrank.
        buffers: buffers that another tensor was put in the place of.
        tensors: attributes that hold other tensors than before.
    """

    counted: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there was any."""
        return bool(self.counted or self.buffers or self.tensors)


@dataclass(frozen=True)
class _Part:
    module: nn.Module
    name: str
    values: dict[str, Any]
    buffers: dict[str, Any]
    containers: dict[str, int]
    hooks: dict[str, dict[int, Any]]


def hold_parameter(module: nn.Module, name: str, parameter: Tensor) -> None:
    """Let a module have another parameter by a name.

    torch's own recurrent layers keep a second list of theirs, which setting the attribute keeps right. A
    class of the user's may do anything with it: write the values into the parameter that was there.
    """
    if type(module).__setattr__ in (nn.Module.__setattr__, nn.RNNBase.__setattr__):
        setattr(module, name, parameter)
    else:
        module._parameters[name] = cast("nn.Parameter", parameter)


@contextlib.contextmanager
def watching(root: nn.Module) -> Iterator[Changes]:
    """Note what is changed in a module's attributes inside, and undo it at the end; also what is kept
    meanwhile in containers and objects that they hold, and in those of its classes and their files.
    """
    before = Before(root)
    changes = Changes()
    try:
        yield changes
    finally:
        before.compare(changes)
        before.restore()


class Before:
    """What a module and its parts hold now, but for the values of tensors, to be put back."""

    def __init__(self, root: nn.Module) -> None:
        parts = list(root.named_modules())
        # Of a part of forward that runs whole: the modules whose methods it was taken from.
        owners = [("", owner) for owner in getattr(root, "owners", ())]
        seen_by_python = [each for each in parts if _has_attributes(each[1])] + owners
        self._parts = [_look(name, module) for name, module in seen_by_python]
        self._memories = Memories(
            [module for _, module in seen_by_python], _classes(module for _, module in parts)
        )

    def compare(self, changes: Changes) -> None:
        """Add what has changed since."""
        for part in self._parts:
            _compare(part, changes)

    def restore(self) -> None:
        """Put it back."""
        for part in self._parts:
            _undo(part)
        self._memories.restore()


def _has_attributes(module: nn.Module) -> bool:
    """Whether a module keeps attributes that Python sees: not what torch.jit has compiled."""
    return not isinstance(module, ScriptModule)


def _look(name: str, module: nn.Module) -> _Part:
    values = dict(module.__dict__)
    lengths = {
        key: len(value)
        for key, value in values.items()
        if isinstance(value, list | dict | set) and key not in _TORCHS
    }
    return _Part(module, name, values, dict(module._buffers), lengths, hooks_of(module))


class Memories:
    """What a module may keep but for its own attributes: the contents of containers that these hold, that its
    classes hold and that their files do, and of objects of classes from there; and what functools.lru_cache
    keeps of functions there.
    """

    def __init__(self, modules: Sequence[nn.Module], classes: Sequence[type]) -> None:
        self._contents: dict[int, tuple[Any, Any, bool]] = {}
        self._remembering: dict[int, tuple[Any, int]] = {}
        self._files = {cls.__module__ for cls in classes}
        for module in modules:
            for key, value in vars(module).items():
                if key not in _TORCHS:
                    self._look(value, _DEPTH, is_own=True)
        files = (vars(sys.modules[name]) for name in self._files & sys.modules.keys())
        for held in (*map(vars, classes), *files):
            for name, value in list(held.items()):
                function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                if isinstance(function, functools._lru_cache_wrapper):
                    self._remembering[id(function)] = (function, function.cache_info().currsize)
                elif not name.startswith("__"):
                    self._look(value, _DEPTH, is_own=False)

    def restore(self) -> None:
        """Let them hold what they held; those of classes and files where they have got tensors. What is
        remembered of calls is forgotten where it became more.
        """
        for value, kept, is_own in self._contents.values():
            held = value if type(value) in _CONTAINERS else vars(value)
            if not _is_as(held, kept) and (is_own or _has_tensors(held)):
                held.clear()
                held.extend(kept) if isinstance(held, list) else held.update(kept)
        for function, size in self._remembering.values():
            if function.cache_info().currsize != size:
                function.cache_clear()

    def _look(self, value: Any, depth: int, *, is_own: bool) -> None:
        is_container = type(value) in _CONTAINERS
        if depth == 0 or id(value) in self._contents or not (is_container or self._is_of_files(value)):
            return
        held = value if is_container else vars(value)
        kept: Any = (
            list(held) if isinstance(held, list) else set(held) if isinstance(held, set) else dict(held)
        )
        self._contents[id(value)] = (value, kept, is_own)
        if len(kept) <= _MOST:
            for each in list(kept.values() if isinstance(kept, dict) else kept):
                self._look(each, depth - 1, is_own=is_own)

    def _is_of_files(self, value: Any) -> bool:
        """Whether it is an object of a class of the files that the module's classes are in."""
        is_plain = type(getattr(value, "__dict__", None)) is dict and not isinstance(
            value, nn.Module | Tensor
        )
        return is_plain and type(value).__module__ in self._files


def _classes(modules: Iterable[nn.Module]) -> list[type]:
    """Those of modules, and what they derive from; none of torch's."""
    return [
        cls
        for cls in {base: None for kind in dict.fromkeys(map(type, modules)) for base in kind.__mro__}
        if cls is not object and not f"{cls.__module__}.".startswith("torch.")
    ]


def _has_tensors(held: Any) -> bool:
    inside = list(held.values()) if isinstance(held, dict) else list(held)
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(inside))


def _is_as(held: Any, kept: Any) -> bool:
    """Whether a container holds the same objects, in the same order, as it did."""
    if len(held) != len(kept):
        return False
    if isinstance(kept, dict):
        return all(
            key is known and value is old
            for (key, value), (known, old) in zip(held.items(), kept.items(), strict=True)
        )
    return bool(held == kept) if isinstance(kept, set) else all(map(_is, held, kept))


def _is(one: object, other: object) -> bool:
    return one is other


def hooks_of(module: nn.Module) -> dict[str, dict[int, Any]]:
    """The hooks that a module has, by the attributes that hold them."""
    held = module.__dict__
    return {name: dict(held[name]) for name in _HOOKS if held.get(name)}


def give_hooks(module: nn.Module, hooks: Mapping[str, Mapping[int, Any]]) -> None:
    """Let a module have no hooks but these."""
    for name in _HOOKS:
        held = module.__dict__.get(name, {})
        if held or name in hooks:
            held.clear()
            held.update(hooks.get(name, {}))


def _compare(before: _Part, changes: Changes) -> None:
    prefix = f"{before.name}." if before.name else ""
    for key, value in before.module._buffers.items():
        if value is not before.buffers.get(key):
            changes.buffers.append(prefix + key)
    for key, value in before.module.__dict__.items():
        old = before.values.get(key)
        if key in before.containers and value is old:
            if len(before.values[key]) != before.containers[key]:
                changes.counted.append(prefix + key)
        elif value is old:
            continue
        elif isinstance(value, Tensor):
            changes.tensors[prefix + key] = value
        elif isinstance(value, _PLAIN) and not (type(value) is type(old) and value == old):
            changes.counted.append(prefix + key)


def _undo(before: _Part) -> None:
    module = before.module
    module._buffers.clear()
    module._buffers.update(before.buffers)
    module.__dict__.clear()
    module.__dict__.update(before.values)
    give_hooks(module, before.hooks)


@contextlib.contextmanager
def swapped_tensors(root: nn.Module, stand_in: Callable[[Tensor], Tensor]) -> Iterator[Changes]:
    """Put other tensors in the place of a module's parameters and buffers, and its own ones back; what its
    forward keeps of them meanwhile is noted, and goes.
    """
    undo: list[tuple[dict[str, Any], str, Any]] = []

    def replace(holder: dict[str, Any], name: str, value: Any) -> None:
        undo.append((holder, name, holder[name]))
        holder[name] = value

    try:
        for module in root.modules():
            for holder in (module._parameters, module._buffers):
                for name, tensor in holder.items():
                    if tensor is not None:
                        replace(holder, name, stand_in(tensor))
            for name, value in module.__dict__.items():
                # nn.LSTM and its like keep a second list of their parameters
                if (
                    isinstance(value, list)
                    and value
                    and all(isinstance(item, nn.Parameter) for item in value)
                ):
                    replace(module.__dict__, name, [stand_in(item) for item in value])
        with watching(root) as changes:
            yield changes
    finally:
        for holder, name, value in reversed(undo):
            holder[name] = value
