"""What objects, containers, classes and files hold, and the hooks of modules but for those that this package
sets; whether that has changed, and putting it back.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import operator
import re
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.introspection import Environment, attributes_of

HOOK_ATTRIBUTES = tuple(name for name, held in vars(nn.Module()).items() if "_hooks" in name and held == {})
_forward = threading.local()  # `hooks`: those that a forward which is traced has not set itself; None: all


def _is_of_spindle(hook: Any) -> bool:
    """Whether this package has set a hook, to see how a layer is called: what that notes is not the layer's,
    and stays there when what the layer has changed is put back.
    """
    called = hook.func if isinstance(hook, functools.partial) else hook
    return (getattr(called, "__module__", None) or "").partition(".")[0] == "spindle_cli"


def is_of_forward(module: nn.Module, name: str, number: int) -> bool:
    """Whether a hook is one of those that `hooks_of_forward_left_alone` leaves alone."""
    set_before: Collection[tuple[int, str, int]] | None = getattr(_forward, "hooks", None)
    return set_before is not None and (id(module), name, number) not in set_before


def hooks_of(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Return the hooks that a module has, by the attributes that hold them."""
    held = module.__dict__
    return {name: dict(held[name]) for name in HOOK_ATTRIBUTES if held.get(name)}


def hooks_of_users(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Return the hooks of a module by their kind (`hooks_of`), but for those that this package has set."""
    return {
        name: {number: hook for number, hook in hooks.items() if not _is_of_spindle(hook)}
        for name, hooks in hooks_of(module).items()
    }


@contextlib.contextmanager
def hooks_of_forward_left_alone(root: nn.Module) -> Iterator[None]:
    """Inside, what hooks note stays noted where forward itself has set them by now: forward goes on with it
    when a layer was looked at in the midst of it, and is to meet the stand-ins there.
    """
    set_before = {
        (id(module), name, number)
        for module in root.modules()
        for name, hooks in hooks_of(module).items()
        for number in hooks
    }
    with _looked_into(set_before):
        yield


def all_hooks_put_back() -> contextlib.AbstractContextManager[None]:
    """Inside, what forward's own hooks note is put back as well: real tensors, which none would know from its
    constants.
    """
    return _looked_into(None)


@contextlib.contextmanager
def _looked_into(hooks: Collection[tuple[int, str, int]] | None) -> Iterator[None]:
    before = getattr(_forward, "hooks", None)
    _forward.hooks = hooks  # no context variable: layers are looked at without those of forward
    try:
        yield
    finally:
        _forward.hooks = before


def give_hooks(module: nn.Module, hooks: Mapping[str, Mapping[int, Any]]) -> None:
    """Let a module have no hooks but these."""
    for name in HOOK_ATTRIBUTES:
        held = module.__dict__.get(name, {})
        if held or name in hooks:
            held.clear()
            held.update(hooks.get(name, {}))


PLAIN = (bool, int, float, complex, str, bytes)
MOST_ENTRIES = 1000  # entries of a container that are looked into
# By the first of these that something is, its contents are read and written, whatever its class does there.
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
# What holds one value, and is no name of anything itself.
_VARIABLES = (types.CellType, contextvars.ContextVar)
MISSING = object()
_MOST_ELEMENTS = 4096  # of an array of numpy's whose values are looked at


class GoesOneWayError(WorkloadError):
    """A forward moves an iterator, which nothing moves back. `key`: the last name by which it has it."""

    def __init__(self, name: str, holder: object) -> None:
        hint = (
            "Count in a number (self.calls += 1) and take what belongs to it from a list; or "
            "declare what changes from step to step: Task(..., step_values={'beta': function})."
        )
        if isinstance(holder, contextvars.ContextVar):
            hint = (
                "Give it a value where it is made (ContextVar(name, default=...)), or let forward reset it "
                "before it ends: token = variable.set(value), variable.reset(token)."
            )
        super().__init__(
            f"forward goes on in {name}, a {type(holder).__name__}, from call to call; looking at a forward "
            "moves it, and nothing moves it back",
            hint=hint,
        )
        self.key = last_name(name)


def last_name(path: str) -> str:
    """Return the name that code has for something, of how it is come to ('self.layer.cache[2]': 'cache')."""
    return str(re.findall(r"\w+", re.sub(r"\[.*?\]|'s default", "", path))[-1])


@dataclass(frozen=True)
class Leftover:
    """What was found changed at one place. `put` lets it be there, and gives what puts back what was there;
    `attribute`: of a module that holds it itself, the name; `has_tensors`: it is an object or container with
    tensors in it.
    """

    name: str
    holder: object
    put: Callable[[], Callable[[], object]]
    attribute: str = ""
    has_tensors: bool = False

    @property
    def is_noted_by_hook(self) -> bool:
        """Whether it is tensors that a hook has put into a container."""
        is_of_hook = any(f"{name}[" in self.name for name in HOOK_ATTRIBUTES)
        return is_of_hook and self.has_tensors and container_of(self.holder) is not None

    @classmethod
    def of_attribute(cls, module: nn.Module, name: str, value: Any, dotted: str = "") -> Leftover:
        """Return what an attribute of a module now is; `dotted`: its name for messages, if another."""
        put = functools.partial(_set_entry, module.__dict__, name, value)
        return cls(f"self.{dotted or name}", module, put, name)


class Memory(NamedTuple):  # a thousand are made for each look at a layer
    """A container, an object, a class or a file, and what it held.

    Attributes:
        path: how it is come to: the name of an attribute, a class or a file, then keys.
        is_own: a module comes to it, not a class or a file alone.
        by_names: its fields are meant, not its entries.
        named: of a class or file, the names that are meant; None: all.
    """

    holder: Any
    path: tuple[str, ...]
    kept: Any
    is_own: bool
    by_names: bool
    named: Collection[str] | None = None

    @property
    def held(self) -> Any:
        """What the container, object, class or file holds now."""
        return contents_of(self.holder, by_names=self.by_names)

    @property
    def is_attribute(self) -> bool:
        """Whether it is a container that is an attribute of a module."""
        return self.is_own and len(self.path) == 1 and not self.by_names and not self.is_of_hook

    @property
    def is_of_hook(self) -> bool:
        """Whether a module comes to it by a hook."""
        return self.is_own and self.path[0].rpartition(".")[2] in HOOK_ATTRIBUTES

    @property
    def name(self) -> str:
        """What messages call it."""
        return ("self." if self.is_own else "") + "".join(self.path)

    @property
    def changed(self) -> list[str]:
        """What of it is another now: its fields where they are meant, otherwise all of it."""
        if not self.by_names:
            return [self.name]
        held = self.held
        fields = [
            key
            for key in {**self.kept, **held}
            if not _is(held.get(key, MISSING), self.kept.get(key, MISSING))
        ]
        return [f"{self.name}.{key}" for key in fields]

    @property
    def leftovers(self) -> list[Leftover]:
        """What of it is another now, to be put there once more: of a module, attributes one by one."""
        held = self.held
        if not isinstance(self.holder, nn.Module):
            put = functools.partial(self.put, held)
            return [Leftover(self.name, self.holder, put, has_tensors=has_tensors(held))]
        return [
            Leftover.of_attribute(self.holder, name, value)
            for name, value in held.items()
            if not _is(value, self.kept.get(name, MISSING))
        ]

    def put(self, held: Any) -> Callable[[], object]:
        """Let what has come to it in `held`, or is another there, come to what it holds; gives what puts that
        back.
        """
        before, kept = self.held, self.kept
        now = held
        if isinstance(held, dict) and kept.keys() <= held.keys():
            new = {key: value for key, value in held.items() if not _is(value, kept.get(key, MISSING))}
            now = {**before, **new}
        elif isinstance(held, list) and len(held) > len(kept) and is_as_before(held[: len(kept)], kept):
            now = before + held[len(kept) :]
        self._replace(kept=now).restore()
        return self._replace(kept=before).restore

    def restore(self) -> None:
        """Let it hold what it held.

        Raises:
            WorkloadError: it goes one way alone.
        """
        holder, kept = self.holder, self.kept
        if self.by_names:
            fields: Any = attributes_of(holder)
            if isinstance(fields, Environment):
                fields.become(kept)
            else:
                fields.clear()
                fields.update(kept)
        elif isinstance(holder, types.CellType) and kept[0] is MISSING:
            del holder.cell_contents
        elif isinstance(holder, _VARIABLES) and kept[0] is not MISSING:
            _set_variable(holder, kept[0])
        elif isinstance(holder, np.ndarray):
            if not holder.flags.writeable:  # a view of what somebody else holds, and changes
                return
            holder[...] = np.frombuffer(kept[0], holder.dtype).reshape(holder.shape)
        elif (kind := container_of(holder)) is not None:
            kind.clear(holder)
            kind.extend(holder, kept) if kind in (list, deque) else kind.update(holder, kept)
        else:
            raise GoesOneWayError(self.name, holder)


def container_of(value: Any) -> Any:
    """Return the kind of container that something is read as; None where it is none."""
    if isinstance(value, _CONTAINERS):
        return next(kind for kind in _CONTAINERS if isinstance(value, kind))
    return None


def contents_of(value: Any, *, by_names: bool) -> Any:
    """Return a copy of what something holds."""
    if type(value) is dict and not by_names:
        return value.copy()
    if by_names:
        return dict(attributes_of(value) or {})
    if isinstance(value, _VARIABLES):
        return [value_of_variable(value, MISSING)]
    if isinstance(value, np.ndarray):
        return [value.tobytes()]
    kind = container_of(value)
    if kind is None:
        return [_position(value)]
    if kind in (list, deque):
        return list(kind.__iter__(value))
    return set(value) if kind is set else {key: kind.__getitem__(value, key) for key in kind.__iter__(value)}


def _set_entry(holder: dict[str, Any], name: str, value: Any) -> Callable[[], object]:
    """Let a dict have an entry, or none; gives what puts back what it has."""
    before = holder.get(name, MISSING)
    if value is MISSING:
        holder.pop(name, None)
    else:
        holder[name] = value
    return functools.partial(_set_entry, holder, name, before)


class FunctionsHeld(NamedTuple):
    """Functions of a class or file, without defaults and variables around them, and how each is come to."""

    functions: tuple[types.FunctionType, ...]
    paths: tuple[tuple[str, ...], ...]

    def with_paths(self) -> Iterator[tuple[types.FunctionType, tuple[str, ...]]]:
        return zip(self.functions, self.paths, strict=True)


class Empty(NamedTuple):
    """What names of a class or file stand for that keeps nothing, but for attributes and classes' own names.

    Attributes:
        values: by these names.
        functions: those of `values`, by the file that they were written in.
        classes: likewise.
    """

    values: dict[str, Any]
    functions: dict[str, FunctionsHeld]
    classes: dict[str, list[type]]


class _Empties:
    """What classes and files have that keeps nothing, as of the last look at each: most of what they have,
    and a thousand looks at the same are taken while a workload is analysed.
    """

    def __init__(self) -> None:
        self._last_seen: weakref.WeakKeyDictionary[Any, Empty] = weakref.WeakKeyDictionary()

    def of(self, holder: Any, holder_name: str, held: dict[str, Any]) -> tuple[Empty, list[tuple[str, Any]]]:
        """Return what of `held`, which a class or file of this name holds, keeps nothing, and the rest."""
        empty = self._last_seen.get(holder)
        if empty is not None:
            get = empty.values.get
            others = [(name, value) for name, value in held.items() if get(name, MISSING) is not value]
            if len(others) + len(empty.values) == len(held) and not any(_keeps_nothing(v) for _, v in others):
                return empty, others
        values = {name: value for name, value in held.items() if _keeps_nothing(value)}
        empty = self._last_seen[holder] = _sorted_by_file(holder_name, values)
        return empty, [(name, value) for name, value in held.items() if name not in values]


def _sorted_by_file(holder_name: str, values: dict[str, Any]) -> Empty:
    """Sort what a class or file has by the Python files that its functions and classes were written in."""
    functions: dict[str, list[tuple[types.FunctionType, tuple[str, ...]]]] = {}
    classes: dict[str, list[type]] = {}
    for name, value in values.items():
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if isinstance(function, types.FunctionType):
            functions.setdefault(function.__module__ or "", []).append((function, (holder_name, f".{name}")))
        elif isinstance(value, type):
            classes.setdefault(value.__module__ or "", []).append(value)
    by_file = {
        file: FunctionsHeld(
            tuple(function for function, _ in with_paths), tuple(path for _, path in with_paths)
        )
        for file, with_paths in functions.items()
    }
    return Empty(values, by_file, classes)


@functools.cache
def names_that_keep_nothing() -> _Empties:
    """Return what is remembered of classes and files in this process."""
    return _Empties()


_KEEP_NOTHING = (*PLAIN, type(None), type, types.ModuleType, types.BuiltinFunctionType)


def _keeps_nothing(value: Any) -> bool:
    """Whether a look at a value, as a class or file has it by a name, finds nothing that is kept but by the
    attributes of a function or the names of a class.
    """
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if type(function) is types.FunctionType:
        return not (function.__defaults__ or function.__kwdefaults__ or function.__closure__)
    return type(value) is property or isinstance(value, _KEEP_NOTHING)


def replace_plain(
    memory: Memory,
    replacement: Callable[[object, str], object],
    undo: contextlib.ExitStack,
    most: int = MOST_ENTRIES,
) -> tuple[bool, bool]:
    """Put something else in the place of a memory's plain values that have changed, and make a list that has
    grown `most` times as long.

    Returns:
        Whether there was any, and whether that is known to be all that could be counted there.
    """
    holder, held, kept = memory.holder, memory.held, memory.kept
    if isinstance(holder, _VARIABLES):
        is_some = is_plain_other(held[0], kept[0])
        if is_some:
            undo.callback(_set_variable, holder, held[0])
            _set_variable(holder, replacement(holder, last_name(memory.name)))
        return is_some, True
    if memory.by_names or isinstance(held, dict):
        fields: Any = attributes_of(holder) if memory.by_names else holder
        changed = {key: value for key, value in held.items() if is_plain_other(value, kept.get(key))}
        undo.callback(fields.update, changed)
        fields.update({key: replacement(holder, str(key)) for key in changed})
        return bool(changed), memory.by_names or held.keys() == kept.keys()
    if container_of(holder) not in (list, deque) or len(held) < len(kept):
        return False, is_as_before(held, kept)
    return _replace_entries(memory, replacement, undo, most), True


def _replace_entries(
    memory: Memory, replacement: Callable[[object, str], object], undo: contextlib.ExitStack, most: int
) -> bool:
    """Do what `replace_plain` does, for a list that is no shorter than it was; whether there was anything."""
    holder, held, kept = memory.holder, memory.held, memory.kept
    kind = container_of(holder)
    before = kept + [MISSING] * (len(held) - len(kept))
    is_plain = [is_plain_other(*pair) for pair in zip(held, before, strict=True)]
    more = [replacement(holder, last_name(memory.name)) if is_plain[n] else held[n] for n in range(len(held))]
    if len(held) > len(kept):
        more = more * most
    undo.callback(kind.extend, holder, held)
    undo.callback(kind.clear, holder)
    kind.clear(holder)
    kind.extend(holder, more)
    return any(is_plain) or len(held) > len(kept)


def is_plain_other(value: Any, old: Any) -> bool:
    """Whether a value is plain, and another than before."""
    return isinstance(value, PLAIN) and not (type(value) is type(old) and value == old)


def is_other_container(value: Any, old: Any) -> bool:
    """Whether a value is a list, tuple or dict of plain values, and another than before."""
    if type(value) not in (list, tuple, dict) or not _is_plain_inside(value):
        return False
    return not (type(value) is type(old) and _is_plain_inside(old) and value == old)


def _is_plain_inside(value: Any) -> bool:
    return all(isinstance(leaf, PLAIN) for leaf in pytree.tree_leaves(value))


def value_of_variable(variable: types.CellType | contextvars.ContextVar[Any], nothing: Any = None) -> Any:
    """Return what is in a variable that functions share, or in one of the context; `nothing`: nothing yet."""
    try:
        return variable.cell_contents if isinstance(variable, types.CellType) else variable.get()
    except (ValueError, LookupError):
        return nothing


def _set_variable(variable: types.CellType | contextvars.ContextVar[Any], value: Any) -> None:
    if isinstance(variable, types.CellType):
        variable.cell_contents = value
    else:
        variable.set(value)


def is_small_array(value: Any) -> bool:
    """Tell whether a value is an array of numpy's whose values are looked at."""
    return isinstance(value, np.ndarray) and value.dtype != object and value.size <= _MOST_ELEMENTS


def bound_values(value: types.MethodType | functools.partial[Any]) -> tuple[Any, ...]:
    """Return the function of a method or a partial, and the object or the arguments that it is bound to."""
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    return (value.func, *value.args, *value.keywords.values())


def goes_one_way(value: Any) -> bool:
    """Whether it is one of Python's own iterators."""
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


def _position(value: Any) -> str:
    """Say how far an iterator has come."""
    if isinstance(value, types.GeneratorType):
        if (frame := value.gi_frame) is None:
            return "at its end"
        return f"{frame.f_lasti} {[_told(variable) for variable in frame.f_locals.values()]}"
    if isinstance(value, itertools.count | itertools.repeat):
        return repr(value)
    if (left := getattr(value, "__length_hint__", None)) is not None:
        return f"{left()} left"
    if not any("__reduce__" in vars(base) for base in type(value).__mro__[:-1]):  # it says nothing of itself
        return type(value).__name__
    # Of those that go through others (zip, enumerate, itertools.cycle): how far these have come.
    parts = [part for part in value.__reduce__()[1:] if isinstance(part, tuple)]
    return f"{[_told(inner) for part in parts for inner in part]}"


def _told(value: Any) -> str:
    """Return what tells a value of an iterator from another, without asking tensors."""
    if isinstance(value, PLAIN):
        return repr(value)
    if goes_one_way(value):
        return _position(value)
    return f"{id(value)} {len(value) if isinstance(value, list) else ''}"


def has_other_entries(held: Any, kept: Any) -> bool:
    """Whether a container has more or fewer entries than it had, or others that are plain values."""
    if len(held) != len(kept):
        return True
    pairs = (
        [(held.get(key, MISSING), old) for key, old in kept.items()]
        if isinstance(kept, dict)
        else list(zip(held, kept, strict=True))
    )
    return any(new is not old and isinstance(new, PLAIN) and new != old for new, old in pairs)


def is_left(held: Any, kept: Any) -> bool:
    """Whether a container has got tensors, or nothing but plain values, since."""
    pairs = held.items() if isinstance(held, dict) else enumerate(held)
    before = kept if isinstance(kept, dict) else dict(enumerate(kept))
    got = [value for key, value in pairs if not _is(value, before.get(key, MISSING))]
    return has_tensors(held) or all(isinstance(value, PLAIN) for value in got)


def has_tensors(held: Any) -> bool:
    """Tell whether there is a tensor, or one that is traced, in a container or below."""
    inside = list(held.values()) if isinstance(held, dict) else list(held)
    return any(isinstance(leaf, Tensor | fx.Proxy) for leaf in pytree.tree_leaves(inside))


def is_as_before(held: Any, kept: Any) -> bool:
    """Whether a container holds the same objects, in the same order, as it did."""
    if len(held) != len(kept):
        return False
    if not kept or (type(held) is type(kept) is list and all(map(operator.is_, held, kept))):
        return True
    if isinstance(kept, dict):
        if all(map(operator.is_, held, kept)) and all(map(operator.is_, held.values(), kept.values())):
            return True
        return all(
            _is(key, old_key) and _is(value, old)
            for (key, value), (old_key, old) in zip(held.items(), kept.items(), strict=True)
        )
    return bool(held == kept) if isinstance(kept, set) else all(map(_is, held, kept))


def _is(first: object, second: object) -> bool:
    return first is second or (type(first) is type(second) and isinstance(first, PLAIN) and first == second)
