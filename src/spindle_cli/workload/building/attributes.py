"""What a module's forward changes in the module itself, and undoing it; what it keeps elsewhere goes, too.

A forward that keeps what it makes, a table of angles or a mask by its length, would have tensors without
values there once it was looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import contextvars
import functools
import operator
import os
import sys
import threading
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn, strided
from torch.jit import ScriptModule
from torch.utils import _pytree as pytree

from spindle_cli.workload.building.contents import (
    MISSING,
    MOST_ENTRIES,
    PLAIN,
    Empty,
    FunctionsHeld,
    Leftover,
    Memory,
    bound_values,
    container_of,
    contents_of,
    give_hooks,
    goes_one_way,
    has_other_entries,
    has_tensors,
    hooks_of,
    hooks_of_users,
    is_as_before,
    is_left,
    is_of_forward,
    is_other_container,
    is_plain_other,
    is_small_array,
    names_that_keep_nothing,
    replace_plain,
    value_of_variable,
)
from spindle_cli.workload.building.load import settled_module_name
from spindle_cli.workload.building.memory import copy_once_written, share_memory
from spindle_cli.workload.introspection import ASKS_ENVIRONMENT, OF_ENVIRONMENT, OF_TORCH, Reads, fields_of

_DEPTH = 3  # of containers in containers, and in objects
# Objects of classes from there keep nothing of a user's, but for those that are made to.
_NOT_OF_USERS = sys.stdlib_module_names | {"torch", "numpy", "spindle_cli"}
_KEEP_OF_TORCH = frozenset({"torch.quasirandom"})  # files of torch's whose objects go on from call to call
_EXACT = (list, dict, set, OrderedDict, defaultdict, Counter, deque)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, threading.local)


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
        within: what `elsewhere` and `held` are: fields of objects, containers, names of classes and files;
            and what has tensors that were written into.
        leftovers: all of it but buffers and what was written, to be put there once more.
        before: as it was; None: nobody asks.
    """

    counted: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    within: list[str] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    before: Before | None = None

    def note_written(self, was_written: Callable[[Tensor], bool]) -> None:
        """Add what has tensors that were written into; `was_written`: asked of each."""
        if self.before is not None:
            self.within += self.before.written(was_written)

    def __bool__(self) -> bool:
        """Whether anything has changed."""
        return bool(self.counted or self.elsewhere or self.buffers or self.tensors or self.held)

    @property
    def kept(self) -> tuple[str, ...]:
        """Plain values that are now others, and what grew or shrank, wherever."""
        return (*(f"self.{name}" for name in self.counted), *self.elsewhere)

    @property
    def left(self) -> tuple[str, ...]:
        """All that whoever comes next would find, but for buffers."""
        attributes = (*self.counted, *self.tensors)
        return tuple(dict.fromkeys((*(f"self.{name}" for name in attributes), *self.within)))


@dataclass(frozen=True)
class _Part:
    module: nn.Module
    name: str
    values: dict[str, Any]
    buffers: dict[str, Any]
    hooks: dict[str, dict[int, Any]]
    is_owner: bool = False  # of some of the tensors that a region has, which has these as buffers of its own


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
    changes = Changes(before=before)
    try:
        yield changes
    finally:
        before.compare(changes)
        before.restore()


@contextlib.contextmanager
def values_kept(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Tensors that modules and what they hold keep, and that are no parameters or buffers of theirs, have
    afterwards the values of before.
    """
    before = [(kept, copy_once_written(kept)) for root in roots for kept in tensors_kept(root)]
    try:
        yield
    finally:
        for kept, values in before:
            if not share_memory(kept, values):
                kept.data.copy_(values)


def tensors_kept(root: nn.Module, memories: Memories | None = None) -> list[Tensor]:
    """Return the tensors in a module's attributes and those of its parts, and in what these hold, wherever,
    that are no parameters or buffers of theirs.

    Args:
        memories: what they hold, if that is known.
    """
    registered = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    held = [value for part in root.modules() if _has_attributes(part) for value in vars(part).values()]
    inside = (Memories.of(root) if memories is None else memories).tensors()
    tensors_by_id = {id(tensor): tensor for tensor in (*held, *inside) if isinstance(tensor, Tensor)}
    return [
        tensor
        for tensor in tensors_by_id.values()
        if id(tensor) not in registered and tensor.layout is strided
    ]


class Before:
    """What a module and its parts hold now, but for the values of tensors, to be put back."""

    def __init__(self, root: nn.Module) -> None:
        parts = list(root.named_modules())
        # Of a part of forward that runs whole: the modules whose methods it was taken from.
        owners = [("", owner) for owner in getattr(root, "owners", ())]
        seen_by_python = [named for named in parts if _has_attributes(named[1])]
        self._parts = [_look(*named) for named in seen_by_python]
        self._parts += [_look(*named, is_owner=True) for named in owners]
        seen_by_python += owners
        self._memories = Memories(seen_by_python, _classes(module for _, module in parts))

    def compare(self, changes: Changes) -> None:
        """Add what has changed since."""
        for part in self._parts:
            _compare(part, changes)
        self._memories.compare(changes)

    def written(self, was_written: Callable[[Tensor], bool]) -> list[str]:
        """The names of what has tensors that were written into, and that are no parameters or buffers."""
        attributes = [
            f"self.{part.name}.{key}" if part.name else f"self.{key}"
            for part in self._parts
            for key, value in part.values.items()
            if isinstance(value, Tensor) and was_written(value)
        ]
        return [*attributes, *self._memories.written(was_written)]

    def restore(self) -> None:
        """Let the module have the attributes and contents that it had."""
        for part in self._parts:
            _undo(part)
        self._memories.restore()


def _has_attributes(module: nn.Module) -> bool:
    """Whether a module keeps attributes that Python sees: not what torch.jit has compiled."""
    return not isinstance(module, ScriptModule)


def _look(name: str, module: nn.Module, *, is_owner: bool = False) -> _Part:
    held = dict(module.__dict__), dict(module._buffers), hooks_of(module)
    return _Part(module, name, *held, is_owner)


@dataclass(frozen=True)
class Replaced:
    """What something else is in the place of: whether there was anything, and whether that is all that has
    changed, but for tensors.
    """

    is_some: bool
    is_all: bool


class Memories:
    """What a module may keep but for its own attributes: the contents of containers and objects that these
    hold, and that its classes and their files hold, or that functions there do; what classes and files hold
    themselves, and by the names that its code has of them other files of the user's; variables of the
    context, of this thread and of the environment; and what functools.lru_cache keeps of functions there.
    """

    def __init__(self, parts: Sequence[tuple[str, nn.Module]], classes: Sequence[type]) -> None:
        """`parts`: with their names below the module; `classes`: of all of them."""
        self._memories: dict[tuple[object, bool], Memory] = {}
        # By id the dicts of functions without attributes, which most are; with paths, and `is_own`.
        self._bare: dict[object, tuple[dict[str, Any], tuple[str, ...], bool]] = {}
        self._functions: list[FunctionsHeld] = []  # more of them, of classes and files
        self._hidden: list[tuple[str, Tensor]] = []  # of modules that are no parts, by how they are come to
        self._named_tensors: list[tuple[str, Tensor]] = []  # of classes and files
        self._names: list[Memory] = []  # of classes and files
        self._named_by: set[int] = set()  # the ids of these
        self._remembering: dict[int, tuple[Any, int]] = {}
        self._files = {cls.__module__ for cls in classes}
        reads = _read_by(module for _, module in parts)
        others = [(file, named) for file, named in _files_of(reads) if file.__name__ not in self._files]
        self._parts = {id(module) for _, module in parts}
        for prefix, module in parts:
            self._look_into_module(prefix, module)
        for cls in classes:
            self._look_into_names(cls, vars(cls))
        for name in self._files & sys.modules.keys():
            self._look_into_names(sys.modules[name], vars(sys.modules[name]))
        self._look_where_code_reads(reads, others)

    def _look_where_code_reads(
        self, reads: Reads, others: Sequence[tuple[types.ModuleType, Collection[str]]]
    ) -> None:
        """Look at what the modules' code names in `others`, files of the user's, and in classes and the
        environment.
        """
        self._files |= {file.__name__ for file, _ in others}
        for file, named in others:
            self._look_into_names(file, vars(file), named)
        for cls in reads.classes:
            self._look_into_names(cls, vars(cls), reads.names)
        if not ASKS_ENVIRONMENT.isdisjoint(reads.names):
            self._keep(os.environ, (OF_ENVIRONMENT,), is_own=False, by_names=True)

    @classmethod
    def of(cls, root: nn.Module) -> Memories:
        """Look at all that a module and its parts may keep."""
        parts = list(root.named_modules())
        seen_by_python = [part for part in parts if _has_attributes(part[1])]
        return cls(seen_by_python, _classes(module for _, module in parts))

    @classmethod
    def of_hooks_of_forward(cls, operator: nn.Module, root: nn.Module) -> Memories:
        """Return what hooks of an operator note that a forward which is traced has set itself, but for
        attributes of the parts of `root`.
        """
        made = cls((), ())
        made._parts = set(map(id, root.modules()))
        for module in operator.modules():
            for name, hooks in hooks_of_users(module).items():
                for number, hook in hooks.items():
                    if is_of_forward(module, name, number):
                        made._look(hook, (name,), _DEPTH, is_own=True)
        return made

    def replace_plain(self, replacement: Callable[[object, str], object]) -> list[str]:
        """Put something else in the place of plain values that have changed or come to lists, for good, and
        give the names of what holds them. `replacement`: see `changed_replaced`.
        """
        with contextlib.ExitStack() as undo:
            replaced = [
                memory for memory in self._changed() if replace_plain(memory, replacement, undo, most=1)[0]
            ]
            undo.pop_all()
        return [memory.name for memory in replaced]

    def compare(self, changes: Changes) -> None:
        """Add what has changed since."""
        for memory in self._changed():
            changes.within += memory.changed
            changes.leftovers += memory.leftovers
            if not has_other_entries(memory.held, memory.kept):
                changes.held.append(memory.name)
            elif memory.is_attribute:
                changes.counted.append(memory.path[0])
            else:
                changes.elsewhere.append(memory.name)
        for names in self._names:
            for name, value, old in _others(names):
                is_plain = is_plain_other(value, old)
                if is_plain or has_tensors([value]):
                    (changes.elsewhere if is_plain else changes.held).append(f"{names.name}.{name}")
                    changes.within.append(f"{names.name}.{name}")
                    put = functools.partial(_set_name, names.holder, name, value)
                    changes.leftovers.append(Leftover(f"{names.name}.{name}", names.holder, put))

    def _changed(self) -> list[Memory]:
        """Return the memories that hold something else now."""
        changed = [memory for memory in self._memories.values() if not is_as_before(memory.held, memory.kept)]
        bare = {id(attributes): (attributes, path) for attributes, path in self._with_attributes()}
        changed += [
            _of_bare(*now, is_own=False) for key, now in bare.items() if (key, False) not in self._memories
        ]
        return changed + [_of_bare(*then) for key, then in self._bare.items() if then[0] and key not in bare]

    def _with_attributes(self) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
        """Yield the attributes of functions of classes and files that have some now, with how they are come
        to.
        """
        for functions in self._functions:
            if any(map(vars, functions.functions)):
                yield from (
                    (vars(function), path) for function, path in functions.with_paths() if vars(function)
                )

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors in all memories."""
        yield from (tensor for _, tensor in self._named())

    def written(self, was_written: Callable[[Tensor], bool]) -> list[str]:
        """Return the names of those with tensors that were written into."""
        return list(dict.fromkeys(name for name, tensor in self._named() if was_written(tensor)))

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors in them, with names, and those of modules that torch does not know to be parts."""
        for memory in self._memories.values():
            inside = memory.kept.values() if isinstance(memory.kept, dict) else memory.kept
            for leaf in pytree.tree_leaves(list(inside)):
                if isinstance(leaf, Tensor):
                    yield memory.name, leaf
        yield from self._named_tensors
        yield from self._hidden

    def name_of(self, identity: object) -> str | None:
        """Return the name of the memory of the object that has this `id`; None where there is none."""
        memory = self._memories.get((identity, False)) or self._memories.get((identity, True))
        if memory is None and (bare := self._bare.get(identity)) is not None:
            memory = _of_bare(*bare)
        if memory is None:
            paths = (
                path
                for functions in self._functions
                for held, path in functions.with_paths()
                if id(vars(held)) == identity
            )
            return next(("".join(path) for path in paths), None)
        return memory.name

    def have_changed(self) -> bool:
        """Whether any memory holds something else now."""
        changes = Changes()
        self.compare(changes)
        return bool(changes)

    @contextlib.contextmanager
    def changed_replaced(self, replacement: Callable[[object, str], object]) -> Iterator[Replaced]:
        """Inside, something else is in the place of plain values that have changed in objects, containers,
        variables of functions, classes and files, and lists that have grown are much longer.

        Args:
            replacement: gives it, for who holds the value and by which name.
        """
        with contextlib.ExitStack() as undo:
            replaced = [replace_plain(memory, replacement, undo) for memory in self._changed()]
            for names in self._names:
                for name, value, old in list(_others(names)):
                    if is_plain_other(value, old):
                        undo.callback(setattr, names.holder, name, value)
                        setattr(names.holder, name, replacement(names.holder, name))
                        replaced.append((True, True))
            yield Replaced(any(is_some for is_some, _ in replaced), all(is_all for _, is_all in replaced))

    def restore(self) -> None:
        """Let them hold what they held; those of classes and files where they have got tensors or plain
        values alone, as an object there may be made once. What is remembered of calls is forgotten where it
        became more.
        """
        for memory in self._changed():
            if memory.is_own or is_left(memory.held, memory.kept):
                memory.restore()
        for names in self._names:
            for name, value, old in list(_others(names)):
                if isinstance(value, PLAIN) or has_tensors([value]):
                    _set_name(names.holder, name, old)
        for function, size in self._remembering.values():
            if function.cache_info().currsize != size:
                function.cache_clear()

    def _look_into_module(self, dotted: str, module: nn.Module) -> None:
        """Look at the attributes and hooks of a module of this name."""
        prefix = f"{dotted}." if dotted else ""
        for key, value in vars(module).items():
            if key not in OF_TORCH and value is not None and not isinstance(value, PLAIN):
                self._look(value, (prefix + key,), _DEPTH, is_own=True)
        for name, hooks in hooks_of_users(module).items():
            for place, (number, hook) in enumerate(hooks.items()):
                if not is_of_forward(module, name, number):
                    self._look(hook, (prefix + name, f"[{place}]"), _DEPTH, is_own=True)

    def _look_into_names(
        self, holder: Any, names: Mapping[str, Any], named: Collection[str] | None = None
    ) -> None:
        """Look at the names of a class or file; `named`: at these alone."""
        if id(holder) in self._named_by:
            return
        self._named_by.add(id(holder))
        holder_name = settled_module_name(holder.__name__)
        kept = dict(names) if named is None else _named_in(names, named)
        self._names.append(Memory(holder, (holder_name,), kept, is_own=False, by_names=True, named=named))
        others: Iterable[tuple[str, Any]] = kept.items()
        if named is None:
            empty, others = names_that_keep_nothing().of(holder, holder_name, kept)
            self._look_into_empty(empty)
        for name, value in others:
            if isinstance(value, Tensor):
                self._named_tensors.append((f"{holder_name}.{name}", value))
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if isinstance(function, functools._lru_cache_wrapper):
                self._remembering[id(function)] = (function, function.cache_info().currsize)
            elif not name.startswith("__") or isinstance(function, types.FunctionType):
                self._look(function, (holder_name, f".{name}"), _DEPTH, is_own=False)

    def _look_into_empty(self, empty: Empty) -> None:
        """Look into the functions and classes of these files among what keeps nothing itself."""
        for file, functions in empty.functions.items():
            if file in self._files:
                self._look_into_functions(functions)
        for file, classes in empty.classes.items():
            for cls in classes if file in self._files else ():
                self._look_into_names(cls, vars(cls))

    def _look_into_functions(self, functions: FunctionsHeld) -> None:
        """Look at functions that have neither defaults nor variables around them: at their attributes."""
        self._functions.append(functions)
        if any(map(vars, functions.functions)):
            for function, path in functions.with_paths():
                if vars(function):
                    self._look_into_function(function, path, _DEPTH, is_own=False)

    def _look(self, value: Any, path: tuple[str, ...], depth: int, *, is_own: bool) -> None:
        """Look at a value that is come to by `path`, and at what it holds, `depth` levels deep."""
        if depth == 0 or value is None or isinstance(value, PLAIN):
            return
        if type(value) is types.FunctionType:  # most of what classes and files have
            self._look_into_function(value, path, depth, is_own=is_own)
        elif isinstance(value, type):
            if _is_of(value, None if is_own else self._files):
                self._look_into_names(value, vars(value))
        elif (id(value), False) not in self._memories and (id(value), True) not in self._memories:
            self._look_at_object(value, path, depth, is_own=is_own)

    def _look_at_object(self, value: Any, path: tuple[str, ...], depth: int, *, is_own: bool) -> None:
        """Look at something that is neither plain nor a function or class and was not yet looked at."""
        if isinstance(value, (types.MethodType, functools.partial)):
            for bound in bound_values(value):
                self._look(bound, path, depth, is_own=is_own)
        elif isinstance(value, nn.Module):
            if is_own and id(value) not in self._parts:
                self._look_into_hidden(value, path, depth)
        elif type(value) is tuple:
            for number, entry in enumerate(value[:MOST_ENTRIES]):
                self._look(entry, (*path, f"[{number}]"), depth - 1, is_own=is_own)
        elif isinstance(value, contextvars.ContextVar):
            self._keep(value, path, is_own=is_own)
            self._look(value_of_variable(value), path, depth - 1, is_own=is_own)
        elif isinstance(value, types.CellType) or goes_one_way(value) or is_small_array(value):
            self._keep(value, path, is_own=is_own)
        else:
            self._look_into_contents(value, path, depth, is_own=is_own)

    def _look_into_contents(self, value: Any, path: tuple[str, ...], depth: int, *, is_own: bool) -> None:
        """Look at the entries of a container, and at the attributes of an object of the user's."""
        files = None if is_own else self._files
        if type(value) in _EXACT or (container_of(value) is not None and _is_of(type(value), files)):
            kept = self._keep(value, path, is_own=is_own)
            self._look_inside(kept, path, depth, "[{!r:.40}]", is_own=is_own)
        if _is_of_users(value, files):
            kept = self._keep(value, path, is_own=is_own, by_names=True)
            self._look_inside(kept, path, depth, ".{}", is_own=is_own)

    def _look_into_hidden(self, module: nn.Module, path: tuple[str, ...], depth: int) -> None:
        """Look at a module that a module holds and torch does not know to be a part of it."""
        name = "self." + "".join(path)
        hidden = [part for part in module.modules() if id(part) not in self._parts]
        self._hidden += [(name, tensor) for part in hidden for tensor in _tensors_of(part)]
        if _is_of(type(module), None):
            kept = self._keep(module, path, is_own=True, by_names=True)
            self._look_inside(kept, path, depth, ".{}", is_own=True)

    def _look_into_function(
        self, value: types.FunctionType, path: tuple[str, ...], depth: int, *, is_own: bool
    ) -> None:
        """Look at a function's attributes, its defaults and the variables around it."""
        if not _is_of(value, None if is_own else self._files):
            return
        attributes = vars(value)
        if not attributes:
            self._bare.setdefault(id(attributes), (attributes, path, is_own))
        elif (id(attributes), False) not in self._memories:
            self._keep(attributes, path, is_own=is_own)
        if value.__defaults__ or value.__kwdefaults__:
            for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                self._look(default, (*path, "'s default"), depth - 1, is_own=is_own)
        if value.__closure__ is None:
            return
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
            inside = (*path, f": {variable}")
            self._look(cell, inside, depth, is_own=is_own)
            self._look(value_of_variable(cell), inside, depth - 1, is_own=is_own)

    def _keep(self, value: Any, path: tuple[str, ...], *, is_own: bool, by_names: bool = False) -> Any:
        kept = contents_of(value, by_names=by_names)
        self._memories[id(value), by_names] = Memory(value, path, kept, is_own, by_names)
        return kept

    def _look_inside(self, kept: Any, path: tuple[str, ...], depth: int, how: str, *, is_own: bool) -> None:
        if depth > 1 and len(kept) <= MOST_ENTRIES:
            for key, entry in kept.items() if isinstance(kept, dict) else enumerate(kept):
                if type(entry) not in PLAIN and entry is not None:
                    name = how.format(key if _is_plain_key(key) else type(key).__name__)
                    self._look(entry, (*path, name), depth - 1, is_own=is_own)


def _is_plain_key(key: object) -> bool:
    """Whether a key of a dict is a number, a text or the like, or a tuple of such: others write themselves in
    ways of their own, as traced values do.
    """
    entries = key if isinstance(key, tuple) else (key,)
    return all(isinstance(entry, PLAIN) for entry in entries)


def _of_bare(attributes: dict[str, Any], path: tuple[str, ...], is_own: bool) -> Memory:
    """Return the memory of a function that had no attributes."""
    return Memory(attributes, path, {}, is_own, by_names=False)


def _set_name(holder: Any, name: str, value: Any) -> Callable[[], object]:
    """Let a class or file have a name for a value, or no such name; gives what puts back what it has."""
    before = vars(holder).get(name, MISSING)
    delattr(holder, name) if value is MISSING else setattr(holder, name, value)
    return functools.partial(_set_name, holder, name, before)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module itself."""
    held = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in held if tensor is not None]


def _read_by(modules: Iterable[nn.Module]) -> Reads:
    """Return what the code of modules may read."""
    reads = Reads()
    for module in modules:
        reads.of_module(module)
    reads.finish()
    return reads


def _files_of(reads: Reads) -> Iterator[tuple[types.ModuleType, set[str]]]:
    """Yield the Python modules whose names code has, with these names."""
    names_by_file: dict[int, tuple[dict[str, Any], set[str]]] = {}
    for around, name in reads.globals.values():
        names_by_file.setdefault(id(around), (around, set()))[1].add(name)
    for around, names in names_by_file.values():
        file = sys.modules.get(str(around.get("__name__")))
        if file is not None and vars(file) is around:
            yield file, names


def _others(names: Memory) -> Iterator[tuple[str, Any, Any]]:
    """Names of a class or file that stand for another value than before, with that and the one before."""
    held, kept = vars(names.holder), names.kept
    now = dict(held) if names.named is None else _named_in(held, names.named)
    if now.keys() == kept.keys() and all(map(operator.is_, now.values(), map(kept.get, now))):
        return
    for name, value in now.items():
        old = kept.get(name, MISSING)
        if value is not old and not name.startswith("__"):
            yield name, value, old


def _named_in(held: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """Return what a class or file has by these names, by name."""
    if len(named) < len(held):
        return {name: held[name] for name in named if name in held}
    return {name: value for name, value in list(held.items()) if name in named}


def _is_of_users(value: Any, files: Collection[str] | None) -> bool:
    """Whether it is an object with fields, of a class in these files; None: of any of the user's or of a
    library for models; or one that is made to hold whatever it is given.
    """
    if not (isinstance(value, _NAMESPACES) or _is_of(type(value), files)):
        return False
    is_other = isinstance(value, (nn.Module, Tensor, type, types.ModuleType))
    return not is_other and fields_of(value) is not None


def is_of_users_code(code: type | types.FunctionType) -> bool:
    """Whether a class or function is of the user's, or of a library for models."""
    return _is_of(code, None)


def _is_of(code: type | types.FunctionType, files: Collection[str] | None) -> bool:
    """Whether a class or function is of these files; None: of any of the user's or of a library's."""
    file = code.__module__ or ""
    if files is not None:
        return file in files
    return file in _KEEP_OF_TORCH or file.partition(".")[0] not in _NOT_OF_USERS


def _classes(modules: Iterable[nn.Module]) -> list[type]:
    """Return the classes of modules and their bases, but for torch's."""
    return [
        cls
        for cls in {base: None for kind in dict.fromkeys(map(type, modules)) for base in kind.__mro__}
        if cls is not object and not f"{cls.__module__}.".startswith("torch.")
    ]


@contextlib.contextmanager
def noted_by_hooks_of_forward_replaced(
    operator: nn.Module, root: nn.Module, replacement: Callable[[object, str], object]
) -> Iterator[list[str]]:
    """At the end, something else stays in the place of plain values that forward's own hooks of an operator
    have noted meanwhile, as they may be run less or more often than in a step. Gives what they are called.
    """
    seen = Memories.of_hooks_of_forward(operator, root)
    names: list[str] = []
    yield names
    names += seen.replace_plain(replacement)


def _compare(before: _Part, changes: Changes) -> None:
    prefix = f"{before.name}." if before.name else ""
    for key, value in before.module._buffers.items():
        if value is not before.buffers.get(key) and not before.is_owner:
            changes.buffers.append(prefix + key)
    for key, value in before.module.__dict__.items():
        old = before.values.get(key)
        if value is old:
            continue
        if isinstance(value, Tensor):
            changes.tensors[prefix + key] = value
        elif is_plain_other(value, old) or is_other_container(value, old):
            changes.counted.append(prefix + key)
        elif has_tensors([value]):
            changes.held.append(f"self.{prefix}{key}")
            changes.within.append(f"self.{prefix}{key}")
        else:
            continue
        if key != "training":  # modes are looked at elsewhere
            changes.leftovers.append(Leftover.of_attribute(before.module, key, value, prefix + key))


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
