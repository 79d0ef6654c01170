"""What code reads that is not handed to it: what somebody else has left in an object, a file or a module,
by code and names; and clocks, who and where this process is, the system's chance, files.

A trace has the answers of the world that it was made with. So whoever traces code notes what it asks, and may
have clocks and the like answer otherwise, to see whether anything is computed with that. It is told by who
asks: torch, this package and what they call in other threads hear what is so.
"""

from __future__ import annotations

import builtins
import datetime
import dis
import gc
import io
import os
import platform
import random
import re
import socket
import sys
import sysconfig
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from operator import is_not
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.workload.building.attributes import Memories
from spindle_cli.workload.building.contents import hooks_of_users, last_name
from spindle_cli.workload.introspection import ASKS_ENVIRONMENT, OF_ENVIRONMENT, Reads
from spindle_cli.workload.refuse import is_file_of_the_user, is_of_the_user, is_ours, place_of

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
            name: that who leaves it has for it; `place`: see `kept_in`.
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


def kept_in(root: nn.Module, path: str) -> object:
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


def is_table_of_library(path: str) -> bool:
    """Whether a path is that of a dict in an installed library's file which has objects alone, as einops has
    by the classes of tensors what works with them: whoever finds nothing there makes it.
    """
    steps = path.split(".")
    for length in range(len(steps) - 1, 0, -1):
        module = sys.modules.get(".".join(steps[:length]))
        if module is not None:
            break
    else:
        return False
    if is_file_of_the_user(getattr(module, "__file__", None) or ""):
        return False
    table: Any = module
    for step in steps[length:]:
        table = getattr(table, step, None)
    plain = bool | int | float | complex | str | bytes | Tensor | None
    return isinstance(table, dict) and not any(isinstance(leaf, plain) for leaf in table.values())


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


CHANCE = "os.urandom"  # behind uuid, secrets and random.SystemRandom
_MOVED_BY = 10**7  # seconds: another second, minute, hour, day and month
_STDLIB = sysconfig.get_paths()["stdlib"]
_INSTALLED = ("site-packages", "dist-packages")
# Of Python's own, those that ask for themselves, whoever has called them.
_OWN_ASKERS = ("importlib", "inspect.", "linecache.", "logging", "tokenize.", "traceback.", "warnings.")
_LOADING = str(Path(torch.__file__).parent / "serialization.py")
Answer = Callable[..., Any]


@dataclass
class OutsideReads:
    """What code has read so far of what is outside of a workload: clocks, the environment, files, chance.

    Attributes:
        places: by what it has read, 'file:line' where it did first; files that it reads are apart.
        files: of each file that it has read, the same.
        chance: how often it has asked for the system's random numbers.
        moves: how far clocks and the like are from what is so; at 0 they say that.
    """

    places: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    chance: int = 0
    moves: int = 0

    @contextmanager
    def moved(self, moves: int) -> Iterator[None]:
        """Have clocks and the like, and whether files are there, answer otherwise inside."""
        before, self.moves = self.moves, moves
        try:
            yield
        finally:
            self.moves = before


_listening: ContextVar[OutsideReads | None] = ContextVar("_listening", default=None)


@contextmanager
def noting_outside_reads() -> Iterator[OutsideReads]:
    """Note what code inside reads from outside, in this thread, but for other such contexts in it."""
    token = _listening.set(OutsideReads())
    try:
        with heard():
            listening = _listening.get()
            assert listening is not None
            yield listening
    finally:
        _listening.reset(token)


def times_of_chance() -> int:
    """Return how often who is listened to has asked for the system's random numbers."""
    listening = _listening.get()
    return 0 if listening is None else listening.chance


def place_of_chance() -> str | None:
    """'file:line' of who has first asked for them."""
    listening = _listening.get()
    return None if listening is None else listening.places.get(CHANCE)


def _asker(name: str) -> tuple[OutsideReads, str] | None:
    """Who listens, and 'file:line' of the code that asks; None if it is not the user's, or nobody listens."""
    listening = _listening.get()
    if listening is None:
        return None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_of_the_user(frame.f_code):
        if not _hands_on(frame.f_code.co_filename):
            return None
        frame = frame.f_back
    if frame is None or _is_collecting_garbage(frame):
        return None
    place = place_of(frame.f_code.co_filename, frame.f_lineno)
    if name:
        listening.places.setdefault(name, place)
    return listening, place


def _is_collecting_garbage(frame: FrameType | None) -> bool:
    """Whether code runs as Python collects garbage, which may be at any place of a forward."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while callbacks and frame is not None:
        if frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False


@cache
def _hands_on(file: str) -> bool:
    """Whether code of Python's, or what loads torch's files, asks for whoever has called it."""
    if is_ours(file):
        return file == __file__
    if file == _LOADING or file.startswith("<frozen "):
        return "importlib" not in file
    inside = file.removeprefix(_STDLIB + os.sep)
    return inside != file and not inside.startswith((*_OWN_ASKERS, *_INSTALLED))


def _moving(name: str, real: Answer, move: Callable[[Any, int], Any]) -> Answer:
    def answer(*args: Any, **kwargs: Any) -> Any:
        asker = _asker(name)
        given = real(*args, **kwargs)
        return move(given, asker[0].moves) if asker is not None and asker[0].moves else given

    return answer


def _of_time(name: str, real: Answer, place: int) -> Answer:
    """Return a function of a time, which is the present one unless it is given at its place."""

    def answer(*args: Any) -> Any:
        asker = _asker(name) if len(args) <= place else None
        if asker is None or not asker[0].moves:
            return real(*args)
        then = _TIME() + asker[0].moves * _MOVED_BY
        return real(*args, _LOCALTIME(then) if name == "time.strftime" else then)

    return answer


def _chance(count: int) -> bytes:
    asker = _asker("")
    if asker is not None:
        asker[0].chance += 1
        asker[0].places.setdefault(CHANCE, asker[1])
    return _URANDOM(count)


def _open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    asker = _asker("") if set(mode).isdisjoint("wax") else None
    if asker is not None:
        asker[0].files.setdefault(str(file), asker[1])
    return _OPEN(file, mode, *args, **kwargs)


def _stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
    asker = _asker("os.stat")
    if asker is None or asker[0].moves % 2 == 0:
        return _STAT(path, *args, **kwargs)
    try:
        _STAT(path, *args, **kwargs)
    except FileNotFoundError:
        return _STAT(os.curdir)
    raise FileNotFoundError(path)


class _Any(type):
    """A class whose instances are all of the class that it stands for."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__mro__[1])


class _Date(datetime.date, metaclass=_Any):
    @classmethod
    def today(cls) -> Any:
        asker = _asker("datetime.date.today")
        return _DATE.fromtimestamp(_TIME() + (asker[0].moves * _MOVED_BY if asker else 0))


class _Datetime(datetime.datetime, metaclass=_Any):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        asker = _asker("datetime.now")
        return _DATETIME.now(tz) + datetime.timedelta(seconds=asker[0].moves * _MOVED_BY if asker else 0)

    @classmethod
    def utcnow(cls) -> Any:
        return cls.now(datetime.UTC).replace(tzinfo=None)

    @classmethod
    def today(cls) -> Any:
        return cls.now()


_TIME, _LOCALTIME, _URANDOM, _OPEN, _STAT = time.time, time.localtime, os.urandom, builtins.open, os.stat
_DATE, _DATETIME = datetime.date, datetime.datetime


def _seconds(given: float, moves: int) -> float:
    return given + moves * _MOVED_BY


def _nanoseconds(given: int, moves: int) -> int:
    return given + moves * _MOVED_BY * 10**9


def _other_process(given: int, moves: int) -> int:
    """Another process that there is."""
    return 1 if moves % 2 else given


_seed = _moving("torch.initial_seed", torch.initial_seed, int.__add__)
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_STAND_INS: tuple[tuple[Any, str, Any], ...] = (
    *((time, name, _moving(f"time.{name}", getattr(time, name), _seconds)) for name in _CLOCKS),
    *(
        (time, f"{name}_ns", _moving(f"time.{name}_ns", getattr(time, f"{name}_ns"), _nanoseconds))
        for name in _CLOCKS
    ),
    *(
        (time, name, _of_time(f"time.{name}", getattr(time, name), place))
        for name, place in (("localtime", 0), ("gmtime", 0), ("ctime", 0), ("strftime", 1))
    ),
    (datetime, "datetime", _Datetime),
    (datetime, "date", _Date),
    (os, "getpid", _moving("os.getpid", os.getpid, _other_process)),
    (os, "getppid", _moving("os.getppid", os.getppid, _other_process)),
    (os, "urandom", _chance),
    (os, "stat", _stat),
    (random, "_urandom", _chance),
    (socket, "gethostname", _moving("socket.gethostname", socket.gethostname, lambda n, m: n + m * "x")),
    (platform, "node", _moving("platform.node", platform.node, lambda n, m: n + m * "x")),
    (torch, "initial_seed", _seed),
    (torch.random, "initial_seed", _seed),
    (builtins, "open", _open),
    (io, "open", _open),
)


@contextmanager
def heard() -> Iterator[None]:
    """Let what is asked be heard, also by the names that modules of the user's have for it."""
    if any(getattr(module, name) is stand_in for module, name, stand_in in _STAND_INS):
        yield  # as it is already
        return
    by_id = {id(getattr(module, name)): stand_in for module, name, stand_in in _STAND_INS}
    replaced = [(held, name, held[name]) for held, name in _modules().names() if id(held.get(name)) in by_id]
    replaced += [(vars(module), name, getattr(module, name)) for module, name, _ in _STAND_INS]
    try:
        for held, name, value in replaced:
            held[name] = by_id[id(value)]
        yield
    finally:
        for held, name, value in replaced:
            held[name] = value


class _Modules:
    """The Python modules that there were at the last look, but for those of Python's, of torch's and of this
    package, which are thousands; and the names that they have for what is asked.
    """

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._without_file: list[Any] = []
        self._users: list[dict[str, Any]] = []
        self._libraries: dict[int, _Library] = {}  # by the module's id, which stays its own while it is seen

    def names(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Give the namespaces of modules with their names for what is asked."""
        self._look()
        for held in self._users:
            for name in _names_of_askers(held):
                yield held, name
        for library in self._libraries.values():
            if library.count != len(library.held):
                library.look()
            for name in library.names:
                yield library.held, name

    def _look(self) -> None:
        """Sort the modules that there are, if they are others than at the last look."""
        loaded = list(sys.modules.copy().values())
        same = len(loaded) == len(self._seen) and not any(map(is_not, loaded, self._seen))
        if same and not any(isinstance(_file_of(module), str) for module in self._without_file):
            return
        users, libraries, without_file = [], {}, []
        for module in loaded:
            file = _file_of(module)
            if not isinstance(file, str):
                without_file.append(module)
            elif _has_askers(file) and _is_installed(file):
                libraries[id(module)] = self._libraries.get(id(module)) or _Library(vars(module))
            elif _has_askers(file):
                users.append(vars(module))
        self._users, self._libraries, self._without_file = users, libraries, without_file
        self._seen = loaded


@dataclass(eq=False)
class _Library:
    """An installed module, which is looked through again only once it has another number of names: libraries
    have tens of thousands.

    Attributes:
        held: the module's namespace.
        count: of its names at the last look.
        names: those for what is asked.
    """

    held: dict[str, Any]
    count: int = -1
    names: tuple[str, ...] = ()

    def look(self) -> None:
        """Look through its names."""
        self.count, self.names = len(self.held), _names_of_askers(self.held)


@cache
def _modules() -> _Modules:
    """Return the modules of this process as of the last look."""
    return _Modules()


def _file_of(module: Any) -> Any:
    return getattr(module, "__file__", None)


def _names_of_askers(held: dict[str, Any]) -> tuple[str, ...]:
    asker_ids, values = _replaced_ids(), list(held.items())
    if asker_ids.isdisjoint([id(value) for _, value in values]):
        return ()
    return tuple(name for name, value in values if id(value) in asker_ids)


@cache
def _has_askers(file: str) -> bool:
    return not is_ours(file) and not _is_of_python_or_torch(file)


@cache
def _is_installed(file: str) -> bool:
    return any(f"{os.sep}{folder}{os.sep}" in file for folder in _INSTALLED)


@cache
def _replaced_ids() -> frozenset[int]:
    return frozenset(id(getattr(module, name)) for module, name, _ in _STAND_INS)


def _is_of_python_or_torch(file: str) -> bool:
    inside = file.removeprefix(_STDLIB + os.sep)
    return (inside != file and not inside.startswith(_INSTALLED)) or f"{os.sep}torch{os.sep}" in file
