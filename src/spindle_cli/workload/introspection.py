"""What can be told of code and objects without running them: what modules, the user's own objects and the
environment of this process hold by names; and which code a forward runs, from `forward` to the functions,
methods and classes that it names, and so on, so that it is known which attributes and names it may read.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from spindle_cli.workload.refuse import is_file_of_the_user, place_of

OF_TORCH = frozenset(vars(nn.Module()))  # a module's own dicts of parameters, buffers, parts and hooks
OF_ENVIRONMENT = "os.environ"
ASKS_ENVIRONMENT = frozenset({"environ", "getenv"})  # by which code asks for the environment's variables


class _Fields(MutableMapping[str, Any]):
    """The fields of an object whose class has slots: these, by the names that they are kept by, and what its
    dict holds if it has one.
    """

    def __init__(self, value: Any, slots: Mapping[str, types.MemberDescriptorType]) -> None:
        self._value = value
        self._slots = slots
        self._dict: dict[str, Any] = getattr(value, "__dict__", {})

    def __getitem__(self, name: str) -> Any:
        if name not in self._slots:
            return self._dict[name]
        try:
            return self._slots[name].__get__(self._value)
        except AttributeError as error:  # nothing is there yet
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._slots:
            self._slots[name].__set__(self._value, value)
        else:
            self._dict[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._slots:
            self._slots[name].__delete__(self._value)
        else:
            del self._dict[name]

    def __iter__(self) -> Iterator[str]:
        names = (*self._slots, *self._dict)
        return (name for name in names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Attributes(MutableMapping[str, Any]):
    """The attributes of a module, but for those that torch has of each."""

    def __init__(self, module: nn.Module) -> None:
        self._held = module.__dict__

    def __getitem__(self, name: str) -> Any:
        if name in OF_TORCH:
            raise KeyError(name)
        return self._held[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._held[name] = value

    def __delitem__(self, name: str) -> None:
        del self._held[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in list(self._held) if name not in OF_TORCH)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Environment(MutableMapping[str, Any]):
    """The variables of this process's environment, as os.environ keeps them; by name, in alphabetical order.
    What is no bytes, nobody but who asks os.environ sees.
    """

    def __init__(self) -> None:
        self._seen: Any = os.environ

    def __getitem__(self, name: str) -> Any:
        return self._seen._data[self._seen.encodekey(name)]

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, bytes):
            self._seen[name] = self._seen.decodevalue(value)
        self._seen._data[self._seen.encodekey(name)] = value

    def __delitem__(self, name: str) -> None:
        del self._seen[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(map(self._seen.decodekey, list(self._seen._data))))

    def __len__(self) -> int:
        return len(self._seen._data)

    def become(self, kept: Mapping[str, Any]) -> None:
        """Let it have these variables and no others; what it has already is not touched."""
        for name in [name for name in self if name not in kept]:
            del self[name]
        for name, value in kept.items():
            if self.get(name) is not value:
                self[name] = value


def fields_of(value: Any) -> MutableMapping[str, Any] | None:
    """Return what an object holds by names, in its dict and in the slots of its class, whatever the class
    does with who asks or sets; None: nothing could be.
    """
    slots = _slots_of(type(value))
    if slots:
        return _Fields(value, slots)
    held = getattr(value, "__dict__", None)
    return held if type(held) is dict else None


def attributes_of(value: Any) -> MutableMapping[str, Any] | None:
    """Return the fields of an object; of a module, those that torch has not put there; of os.environ,
    variables.
    """
    if value is os.environ:
        return Environment()
    return _Attributes(value) if isinstance(value, nn.Module) else fields_of(value)


def _slots_of(cls: type) -> dict[str, types.MemberDescriptorType]:
    """Return the slots of a class and its bases, by the names that they are kept by."""
    return {
        name: slot
        for base in reversed(cls.__mro__)
        if "__slots__" in vars(base)
        for name, slot in vars(base).items()
        if isinstance(slot, types.MemberDescriptorType)
    }


# What is no user's: of these, only what their objects hold.
_LIBRARIES = (
    frozenset({"torch", "torchvision", "torchaudio", "numpy", "spindle_cli", "triton"})
    | sys.stdlib_module_names
)
_OF_BACKWARD = frozenset({"backward", "vjp"})  # methods of a torch.autograd.Function
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
# What every module has.
OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_MADE_ONCE = frozenset(
    {"__init__", "__new__", "__init_subclass__", "__setattr__", "__repr__", "__str__", "__post_init__"}
)


def is_users(thing: Any) -> bool:
    """Whether a function, class or module is of the user's code or of a library of models."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None)
    return isinstance(name, str) and _is_of_users(name)


@functools.cache
def _is_of_users(module: str) -> bool:
    return module == "__main__" or module.partition(".")[0] not in _LIBRARIES


def is_users_own(thing: Any) -> bool:
    """Whether a function, class or module is of a file of the user's own, and of no package."""
    if isinstance(thing, types.FunctionType):
        return is_file_of_the_user(thing.__code__.co_filename)
    is_module = isinstance(thing, types.ModuleType)
    module = thing if is_module else sys.modules.get(getattr(thing, "__module__", ""))
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_file_of_the_user(file)


class Reads:
    """What code may read, by names.

    Attributes:
        names: attributes and keys that it names.
        globals: names of Python modules that it reads, as (the module's dict, name).
        cells: variables of functions around it.
        modules: Python modules that it names.
        classes: of the user's, that it names or that its objects have.
    """

    def __init__(self, *, backward: bool = True, follows: Callable[[Any], bool] = is_users) -> None:
        """`backward`: what backward passes run counts, too. `follows`: whose code is looked into."""
        self._backward = backward
        self._follows = follows
        self.names: set[str] = set()
        self.globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.cells: dict[int, tuple[types.CellType, str]] = {}
        self.modules: dict[int, types.ModuleType] = {}
        self.classes: dict[type, None] = {}
        self.codes: dict[types.CodeType, None] = {}
        self.functions: list[types.FunctionType] = []
        self._methods: dict[str, list[Any]] = {}
        self._pending: list[Any] = []
        self._seen: set[int] = set()
        self._classes_seen: set[type] = set()
        self._kept: list[Any] = []  # what `_seen` has the ids of

    def of_module(self, module: nn.Module) -> None:
        """Follow what calling a module runs."""
        self.of_class(type(module))
        self._pending += _hooks(module, backward=self._backward)
        for key, value in module.__dict__.items():
            if key not in OF_MODULES and type(value) not in _PLAIN:
                self._held(value, 3)
        self.call("forward")

    def of_function(self, function: types.FunctionType | types.MethodType) -> None:
        """Follow what calling a function runs."""
        self._pending.append(function)

    def of_object(self, value: Any) -> None:
        """Follow what an object does that has no `forward`, and what it holds; or a function."""
        self._held(value, 3)

    def _held(self, value: Any, depth: int) -> None:
        """Follow what a module, or an object that it holds, has in an attribute."""
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self._pending.append(value)
        elif not isinstance(value, type | nn.Module | torch.Tensor) and depth and self._follows(type(value)):
            if id(value) in self._seen:
                return
            self._seen.add(id(value))
            self._kept.append(value)
            self.of_class(type(value))
            for inner in (fields_of(value) or {}).values():
                self._held(inner, depth - 1)

    def call(self, *names: str) -> None:
        """Follow the methods of these names, of all classes there are."""
        for name in names:
            if name not in self.names:
                self.names.add(name)
                self._pending += self._methods.get(name, [])

    def of_class(self, cls: type) -> None:
        """Follow what the methods of a class do that code names."""
        if cls in self._classes_seen:
            return
        self._classes_seen.add(cls)
        for base in cls.__mro__:
            if base in self.classes or not self._follows(base):
                continue
            self.classes[base] = None
            is_called = issubclass(base, torch.autograd.Function)  # by torch: its forward and its backward
            for name, value in base.__dict__.items():
                if name in _MADE_ONCE or not _is_function(value):
                    continue
                if is_called and name in _OF_BACKWARD and not self._backward:
                    continue
                if is_called or name in self.names or (name[:2] == name[-2:] == "__"):
                    self._pending.append(value)
                self._methods.setdefault(name, []).append(value)

    def finish(self) -> None:
        """Follow all of it to the end."""
        while self._pending:
            self._follow(self._pending.pop())

    def comes_to(self, value: Any) -> bool:
        """Whether code has a value by any name, or something that hands its calls on to it."""
        return id(value) in self._seen

    def place_of(self, name: str) -> str | None:
        """'file:line' where code names something."""
        for code in self.codes:
            for instruction in dis.get_instructions(code):
                if (
                    instruction.argval == name
                    and instruction.positions is not None
                    and instruction.positions.lineno is not None
                ):
                    return place_of(code.co_filename, instruction.positions.lineno)
        return None

    def _follow(self, value: Any) -> None:
        """Follow what calling a value runs, or what an object or file has that code names."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, types.FunctionType):
            if self._follows(value):
                self._function(value)
        elif isinstance(value, type):
            if self._follows(value):
                self.of_class(value)
        elif isinstance(value, types.ModuleType):
            if self._follows(value):
                self.modules[id(value)] = value
                self._names_in(value, self.names)
        elif wrapped := _wrapped_by(value):
            for inner in wrapped:
                self._follow(inner)
        elif not callable(value) and self._follows(type(value)) and not isinstance(value, nn.Module):
            self.of_class(type(value))

    def _function(self, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.cells[id(cell)] = cell, name
            if (inside := _content(cell)) is not None:
                self._pending.append(inside)
        if function.__code__ not in self.codes:
            self.functions.append(function)
        self._code(function.__code__, function.__globals__)

    def _code(self, code: types.CodeType, around: dict[str, Any]) -> None:
        if code in self.codes:
            return
        self.codes[code] = None
        constants = {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
        new = constants.union(code.co_names) - self.names
        self.names |= new
        for name in new:
            self._pending += self._methods.get(name, [])
        for module in list(self.modules.values()):
            self._names_in(module, new)
        for name in code.co_names:
            if name in around:
                self.globals[id(around), name] = around, name
                self._pending.append(around[name])
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._code(inner, around)

    def _names_in(self, module: types.ModuleType, names: set[str]) -> None:
        for name in names & module.__dict__.keys():
            self.globals[id(module.__dict__), name] = module.__dict__, name
            self._pending.append(module.__dict__[name])


def _is_function(value: Any) -> bool:
    return isinstance(
        value, types.FunctionType | staticmethod | classmethod | property | functools.cached_property
    ) or isinstance(getattr(value, "__wrapped__", None), types.FunctionType)


def _wrapped_by(value: Any) -> tuple[Any, ...]:
    """Return what a method, a property, a partial or another wrapper of a function hands its calls on to."""
    if isinstance(value, types.MethodType | staticmethod | classmethod):
        return (value.__func__,)
    if isinstance(value, property):
        return (value.fget,)
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    wrapped = getattr(value, "__wrapped__", None)
    return (wrapped,) if isinstance(wrapped, types.FunctionType) else ()


def _hooks(module: nn.Module, *, backward: bool) -> Iterator[Any]:
    of_backward = ("_backward_hooks", "_backward_pre_hooks") if backward else ()
    for key in ("_forward_hooks", "_forward_pre_hooks", *of_backward):
        yield from module.__dict__.get(key, {}).values()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
