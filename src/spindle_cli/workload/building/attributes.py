"""What a module's forward changes in the module itself, and undoing it; what it keeps elsewhere goes, too.

A forward that keeps what it makes, a table of angles or a mask by its length, would have tensors without
values there once it was looked at.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.jit import ScriptModule
from torch.utils import _pytree as pytree

_PLAIN = (bool, int, float, complex, str, bytes)
_TORCHS = frozenset(vars(nn.Module()))  # its own dicts of parameters, buffers, parts and hooks
_HOOKS = tuple(name for name, held in vars(nn.Module()).items() if "_hooks" in name and held == {})
_DEPTH = 3  # of containers in containers, and in objects
_MOST = 1000  # entries of a container that are looked into
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)
# Objects of classes from there keep nothing of a user's.
_NOT_OF_USERS = sys.stdlib_module_names | {"torch", "numpy", "spindle_cli"}


@dataclass
class Changes:
    """What was changed while looking, as 'self.name' below the module.

    Attributes:
        counted: plain values that are now others, and containers that grew or shrank.
        elsewhere: the same in objects and containers that attributes hold, and in classes and files; with
            whose it is.
        buffers: buffers that another tensor was put in the place of.
        tensors: attributes that hold other tensors than before.
        held: what else holds other objects than before, but no more or fewer; with whose it is.
    """

    counted: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there was any."""
        return bool(self.counted or self.elsewhere or self.buffers or self.tensors or self.held)


@dataclass(frozen=True)
class _Part:
    module: nn.Module
    name: str
    values: dict[str, Any]
    buffers: dict[str, Any]
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
        self._memories = Memories(seen_by_python, _classes(module for _, module in parts))

    def compare(self, changes: Changes) -> None:
        """Add what has changed since."""
        for part in self._parts:
            _compare(part, changes)
        self._memories.compare(changes)

    def restore(self) -> None:
        """Put it back."""
        for part in self._parts:
            _undo(part)
        self._memories.restore()


def _has_attributes(module: nn.Module) -> bool:
    """Whether a module keeps attributes that Python sees: not what torch.jit has compiled."""
    return not isinstance(module, ScriptModule)


def _look(name: str, module: nn.Module) -> _Part:
    return _Part(module, name, dict(module.__dict__), dict(module._buffers), hooks_of(module))


@dataclass(frozen=True)
class _Memory:
    """A container, an object, a class or a file, and what it held.

    Attributes:
        path: how it is come to: the name of an attribute, a class or a file, then keys.
        is_own: a module comes to it, not a class or a file alone.
    """

    holder: Any
    path: tuple[str, ...]
    kept: Any
    is_own: bool

    @property
    def held(self) -> Any:
        """What it holds now."""
        return self.holder if type(self.holder) in _CONTAINERS else vars(self.holder)

    @property
    def is_attribute(self) -> bool:
        """Whether it is a container that is an attribute of a module."""
        return self.is_own and len(self.path) == 1 and type(self.holder) in _CONTAINERS

    @property
    def name(self) -> str:
        """As messages have it."""
        return ("self." if self.is_own else "") + "".join(self.path)


class Memories:
    """What a module may keep but for its own attributes: the contents of containers and objects that these
    hold, and that its classes and their files hold, or that functions there do; what classes and files hold
    themselves; and what functools.lru_cache keeps of functions there.
    """

    def __init__(self, parts: Sequence[tuple[str, nn.Module]], classes: Sequence[type]) -> None:
        """`parts`: with their names below the module; `classes`: of all of them."""
        self._memories: dict[int, _Memory] = {}
        self._names: list[_Memory] = []  # of classes and files
        self._remembering: dict[int, tuple[Any, int]] = {}
        self._files = {cls.__module__ for cls in classes}
        for prefix, module in parts:
            for key, value in vars(module).items():
                if key not in _TORCHS:
                    self._look(value, (f"{prefix}.{key}" if prefix else key,), _DEPTH, is_own=True)
        for cls in classes:
            self._look_into_names(cls, vars(cls))
        for name in self._files & sys.modules.keys():
            self._look_into_names(sys.modules[name], vars(sys.modules[name]))

    @classmethod
    def of(cls, root: nn.Module) -> Memories:
        """Those of a module and its parts."""
        parts = list(root.named_modules())
        seen_by_python = [each for each in parts if _has_attributes(each[1])]
        return cls(seen_by_python, _classes(module for _, module in parts))

    def compare(self, changes: Changes) -> None:
        """Add what has changed since."""
        for memory in self._memories.values():
            if not _is_as(memory.held, memory.kept):
                if not _counts(memory.held, memory.kept):
                    changes.held.append(memory.name)
                elif memory.is_attribute:
                    changes.counted.append(memory.path[0])
                else:
                    changes.elsewhere.append(memory.name)
        for names in self._names:
            for name, value, old in _others(names):
                is_plain = isinstance(value, _PLAIN) and not (type(value) is type(old) and value == old)
                if is_plain or _has_tensors([value]):
                    (changes.elsewhere if is_plain else changes.held).append(f"{names.name}.{name}")

    def have_changed(self) -> bool:
        """Whether any has."""
        changes = Changes()
        self.compare(changes)
        return bool(changes)

    def restore(self) -> None:
        """Let them hold what they held; those of classes and files where they have got tensors. What is
        remembered of calls is forgotten where it became more.
        """
        for memory in self._memories.values():
            held, kept = memory.held, memory.kept
            if not _is_as(held, kept) and (memory.is_own or _has_tensors(held)):
                held.clear()
                held.extend(kept) if isinstance(held, list | deque) else held.update(kept)
        for names in self._names:
            for name, value, old in list(_others(names)):
                if _has_tensors([value]):
                    delattr(names.holder, name) if old is _MISSING else setattr(names.holder, name, old)
        for function, size in self._remembering.values():
            if function.cache_info().currsize != size:
                function.cache_clear()

    def _look_into_names(self, holder: Any, names: Mapping[str, Any]) -> None:
        kept = dict(names)
        self._names.append(_Memory(holder, (holder.__name__,), kept, is_own=False))
        for name, value in kept.items():
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(function, functools._lru_cache_wrapper):
                self._remembering[id(function)] = (function, function.cache_info().currsize)
            elif not name.startswith("__"):
                is_method = isinstance(function, types.FunctionType) and isinstance(holder, type)
                self._look(function, (holder.__name__, f".{name}"), 0 if is_method else _DEPTH, is_own=False)

    def _look(self, value: Any, path: tuple[str, ...], depth: int, *, is_own: bool) -> None:
        if depth == 0 or isinstance(value, _PLAIN) or value is None or id(value) in self._memories:
            return
        if isinstance(value, types.FunctionType):
            if is_own or value.__module__ in self._files:
                self._look(vars(value), path, 1, is_own=is_own)
                for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                    self._look(_inside(cell), (*path, f": {variable}"), depth - 1, is_own=is_own)
            return
        is_container = type(value) in _CONTAINERS
        if not (is_container or _is_of_users(value, None if is_own else self._files)):
            return
        held = value if is_container else vars(value)
        kept: Any = (
            list(held)
            if isinstance(held, list | deque)
            else set(held)
            if isinstance(held, set)
            else dict(held)
        )
        self._memories[id(value)] = _Memory(value, path, kept, is_own)
        if depth > 1 and len(kept) <= _MOST:
            inside = kept.items() if isinstance(kept, dict) else enumerate(kept)
            for key, each in inside:
                if type(each) not in _PLAIN and each is not None:
                    inner = f"[{key!r:.40}]" if is_container else f".{key}"
                    self._look(each, (*path, inner), depth - 1, is_own=is_own)


_MISSING = object()


def _others(names: _Memory) -> Iterator[tuple[str, Any, Any]]:
    """Names of a class or file that stand for another value than before, with that and the one before."""
    for name, value in vars(names.holder).items():
        old = names.kept.get(name, _MISSING)
        if value is not old and not name.startswith("__"):
            yield name, value, old


def _inside(cell: types.CellType) -> Any:
    """What is in a variable that functions share; None: nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_of_users(value: Any, files: Collection[str] | None) -> bool:
    """Whether it is an object with attributes, of a class in these files; None: of any of the user's or of a
    library for models.
    """
    if type(getattr(value, "__dict__", None)) is not dict or isinstance(value, nn.Module | Tensor | type):
        return False
    file = type(value).__module__
    return file.partition(".")[0] not in _NOT_OF_USERS if files is None else file in files


def _counts(held: Any, kept: Any) -> bool:
    """Whether a container has more or fewer entries than it had, or others that are plain values."""
    if len(held) != len(kept):
        return True
    pairs = (
        [(held.get(key, _MISSING), old) for key, old in kept.items()]
        if isinstance(kept, dict)
        else list(zip(held, kept, strict=True))
    )
    return any(new is not old and isinstance(new, _PLAIN) and new != old for new, old in pairs)


def _classes(modules: Iterable[nn.Module]) -> list[type]:
    """Those of modules, and what they derive from; none of torch's."""
    return [
        cls
        for cls in {base: None for kind in dict.fromkeys(map(type, modules)) for base in kind.__mro__}
        if cls is not object and not f"{cls.__module__}.".startswith("torch.")
    ]


def _has_tensors(held: Any) -> bool:
    inside = list(held.values()) if isinstance(held, dict) else list(held)
    return any(isinstance(leaf, Tensor | fx.Proxy) for leaf in pytree.tree_leaves(inside))


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
        if value is old:
            continue
        if isinstance(value, Tensor):
            changes.tensors[prefix + key] = value
        elif isinstance(value, _PLAIN) and not (type(value) is type(old) and value == old):
            changes.counted.append(prefix + key)
        elif _has_tensors([value]):
            changes.held.append(f"self.{prefix}{key}")


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
