"""Who reads, by code and names, what somebody else has left in an object, a file or a module."""

from __future__ import annotations

import dis
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import CodeType
from typing import Any

from torch import Tensor, nn

from spindle_cli.workload.building.attributes import Memories
from spindle_cli.workload.building.contents import hooks_of_users, last_name
from spindle_cli.workload.introspection import ASKS_ENVIRONMENT, OF_ENVIRONMENT, Reads

# Code that names one of these may ask an object for any name that it makes.
_BY_ANY_NAME = frozenset({"getattr", "vars", "__dict__"})


class Reader:
    """What the code of some modules reads by name, and the modules and objects that they have."""

    def __init__(self, modules: Iterable[nn.Module], *, backward: bool = True) -> None:
        """`backward`: what runs in their backward passes counts, too."""
        called = list(modules)
        reads = Reads(backward=backward)
        for module in called:
            for part in (module, *getattr(module, "owners", ())):
                for submodule in part.modules():
                    reads.of_module(submodule)
        reads.finish()
        self._reads = reads
        self._globals = {name for _, name in reads.globals}
        self._variables = {name for _, name in reads.cells.values()}  # of functions around
        self._names = {name for code in reads.codes for name in _loaded(code)}
        self._parts = {id(part) for module in called for part in module.modules()}
        self._memories = [Memories.of(module) for module in called]

    def reads(self, name: str, place: object, leaver: Reader) -> bool:
        """Whether it reads what somebody leaves in a place, by a name that it has for that one.

        Args:
            name: that who leaves it has for it; `place`: see `place_of`.
            leaver: the code of who leaves it.
        """
        if isinstance(place, str):  # of a file, or of a class there
            path = list(_steps(name.removeprefix("self.")))
            if path[:-1] == OF_ENVIRONMENT.split("."):
                return self._is_named(path[-1], leaver) and not ASKS_ENVIRONMENT.isdisjoint(self._names)
            is_known = not self._globals.isdisjoint(path[-2:]) or not self._variables.isdisjoint(path[-2:-1])
            return path[-1] in self._names and is_known
        if not isinstance(place, tuple):  # a container, or a variable of functions
            held_names = (memories.name_of(place) for memories in self._memories)
            return any(
                held_name is not None and last_name(held_name) in self._names for held_name in held_names
            )
        holder, *keys = place
        if holder in self._parts:
            return keys[-1] in self._names
        if all(memories.name_of(holder) is None for memories in self._memories):
            return False
        return keys[-1] in self._names or (
            self._is_named(keys[-1], leaver) and not _BY_ANY_NAME.isdisjoint(self._names)
        )

    def _is_named(self, name: str, leaver: Reader) -> bool:
        """Whether its code has this name, or who leaves it does not: one that is made when that runs, others
        may make too.
        """
        return name in self._names or name not in leaver._reads.names

    def place_of(self, name: str) -> str | None:
        """'file:line' where the code names a variable."""
        return self._reads.place_of(name)


@cache
def _loaded(code: CodeType) -> frozenset[str]:
    """The names and texts that code takes the values of."""
    return frozenset(
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname.startswith("LOAD_") and isinstance(instruction.argval, str)
    )


def place_of(root: nn.Module, path: str) -> object:
    """What tells where something is kept: the identity of a container or variable; whose attribute or entry
    it is, and which; the path itself where nobody is found.
    """
    holder: Any = root
    steps = list(_steps(path.removeprefix("self.")))
    for number, step in enumerate(steps):
        inside = _inside(holder, step)
        if inside is None or isinstance(inside, bool | int | float | complex | str | bytes | Tensor):
            return (id(holder), *steps[number:]) if number or hasattr(root, steps[0]) else path
        holder = inside
    return id(holder.__self__ if isinstance(holder, types.MethodType) else holder)


def _steps(path: str) -> Iterator[str]:
    """The names and keys of a path ('layers.0.cache[2].h', 'layer.count: n' of a function's variable)."""
    yield from re.findall(r": \w+|[^.:\[\]]+", path)


def _inside(holder: Any, step: str) -> Any:
    if step.startswith(": "):
        return _variable(holder, step[2:])
    if isinstance(holder, types.CellType):
        holder = holder.cell_contents
    if isinstance(holder, types.MethodType):  # a hook
        holder = holder.__self__
    if isinstance(holder, nn.Module) and (hooks := hooks_of_users(holder).get(step)):
        return list(hooks.values())
    if isinstance(holder, nn.Module) or hasattr(holder, step):
        return getattr(holder, step, None)
    try:
        is_named = isinstance(holder, Mapping) and not step.isdigit()
        return holder[step.strip("'")] if is_named else holder[int(step)]
    except (TypeError, ValueError, LookupError):
        return None


def _variable(holder: Any, name: str) -> types.CellType | None:
    """The cell of a variable around a function."""
    function = getattr(holder, "__func__", holder)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return dict(zip(names, function.__closure__ or (), strict=True)).get(name) if names else None
