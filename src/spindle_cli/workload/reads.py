"""Which code a forward runs, as far as it can be told without running it: from `forward` to the functions,
methods and classes that it names, and so on. So that it is known which attributes and names it may read.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from spindle_cli.workload.fields import fields_of
from spindle_cli.workload.refuse import is_file_of_the_user, place_of

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
