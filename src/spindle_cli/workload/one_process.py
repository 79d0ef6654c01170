"""What code that is not ours sees of torch.distributed: one process, wherever it runs.

A model is computed as in one process, on however many devices. Code from data parallelism asks
torch.distributed whether there are others (`if dist.is_initialized(): dist.all_reduce(n)`), and workers are
many. So whoever is called by Spindle and is not Spindle hears that nothing is initialised, and that it is
rank 0 of 1; what would talk to others is refused. It is told by who asks, not by when: our own collectives
run beside user code, in other threads, and inside of operators.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed
from torch.distributed import distributed_c10d

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.refuse import is_ours, place_of_caller

_DISTRIBUTED = str(Path(torch.distributed.__file__).parent)
# Between who asks and torch.distributed: contextlib's decorators, importlib; what its autograd functions go
# through.
_AUTOGRAD = str(Path(torch.autograd.__file__).parent)
_OVERRIDES = torch.overrides.__file__
_MESSAGES = str(Path(__file__).parent.parent / "runtime" / "communication") + os.sep
_COLLECTIVES = tuple(
    str(Path(_DISTRIBUTED, name)) for name in ("distributed_c10d.py", "_functional_collectives")
)
_TORCHS = (_DISTRIBUTED, _AUTOGRAD, _OVERRIDES)
_BETWEEN = (*_TORCHS, sysconfig.get_paths()["stdlib"], "<frozen ")
_INSTALLED = ("site-packages", "dist-packages")  # folders in that of the standard library
_WRAPPER = "wrapper"  # around every function of torch.distributed, to log it
_ANSWERED = ("get_rank", "get_world_size")
_REFUSED = ("init_process_group",)  # asks whether that was called before
_MODE = "__torch_function__"


def show_one_process() -> None:
    """Let all code but ours see one process from now on, as long as this one lasts.

    Code of a script that is not called by us, in the main thread, sees what is there.
    """
    world: Any = distributed_c10d._world
    if not isinstance(world, _World):
        seen = _World()
        seen.__dict__.update(world.__dict__)
        distributed_c10d._world = seen


def refuse_call(name: str, place: str | None) -> NoReturn:
    """Refuse what would talk to other processes.

    Raises:
        WorkloadError: always.
    """
    where = f"{place}: " if place else ""
    raise WorkloadError(
        f"{where}torch.distributed.{name} is called, and code of a workload sees one process, wherever it "
        "runs",
        hint="Leave it out: a task's forward is given the whole batch, as in one process, and its loss is "
        "that of the whole batch. Or guard it by `if torch.distributed.is_initialized():`, which is False "
        "here.",
    )


def collective_of_error(error: BaseException) -> str | None:
    """Return the function of torch.distributed that code has called where one raises an error itself; None if
    what raises is something else.
    """
    called: str | None = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(_COLLECTIVES):
            called = None
        elif called is None and code.co_name != _WRAPPER:
            called = code.co_name
        trace = trace.tb_next
    return called


def is_of_distributed(function: Any) -> bool:
    """Whether it is one of torch.distributed's."""
    module = getattr(function, "__module__", None)
    return isinstance(module, str) and f"{module}.".startswith("torch.distributed.")


class _World(distributed_c10d._World):
    """What torch.distributed knows; whom it tells that there are others depends on who asks."""

    @property
    def default_pg(self) -> Any:
        """The group of all processes, for us."""
        group = self._default_pg
        caller = _caller_of(sys._getframe(1))
        if caller.is_told:
            return group
        called = caller.called
        if called in _REFUSED or ("_get_default_group" in caller.through and called not in _ANSWERED):
            refuse_call(called, place_of_caller())
        return _ALONE if called in _ANSWERED else None

    @default_pg.setter
    def default_pg(self, value: Any) -> None:
        self._default_pg = value


class _Alone:
    """The group of one process."""

    def rank(self) -> int:
        """Return the rank of the only process."""
        return 0

    def size(self) -> int:
        """Return the size of the group."""
        return 1


_ALONE = _Alone()


@dataclass(frozen=True)
class _Caller:
    """A question for the group of all processes: whether the answer is what is there, and the functions of
    torch.distributed that it came through, the innermost first.
    """

    is_told: bool
    through: tuple[str, ...]

    @property
    def called(self) -> str:
        """The one that was called."""
        return next((name for name in reversed(self.through) if name != _WRAPPER), "group.WORLD")


def _caller_of(frame: FrameType | None) -> _Caller:
    """Who asks; each of our own messages and sums asks several times."""
    through: list[str] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_MESSAGES):  # what a step moves asks often, and nobody else goes through there
            return _Caller(True, tuple(through))
        if not _is_between(file) and not _is_passed(frame):
            return _Caller(_is_of_ours(file) or _is_script(frame), tuple(through))
        if file.startswith(_DISTRIBUTED):
            through.append(frame.f_code.co_name)
        frame = frame.f_back
    return _Caller(True, tuple(through))


def _is_passed(frame: FrameType) -> bool:
    """Whether a call that torch.distributed has begun for somebody else passes through here, as all do where
    code of others is examined.
    """
    outer: FrameType | None = frame
    while outer is not None and _is_of_ours(outer.f_code.co_filename):
        outer = outer.f_back
    if outer is frame and frame.f_code.co_name == _MODE:
        outer = frame.f_back
    return outer is not None and outer.f_code.co_filename.startswith((_DISTRIBUTED, _OVERRIDES))


_is_of_ours = cache(is_ours)


@cache
def _is_between(file: str) -> bool:
    return file.startswith(_BETWEEN) and (
        file.startswith(_TORCHS) or not any(folder in file for folder in _INSTALLED)
    )


def _is_script(frame: FrameType | None) -> bool:
    """Whether code runs by itself: in the main thread, and not called by us."""
    if threading.current_thread() is not threading.main_thread():
        return False
    while frame is not None:
        if _is_of_ours(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return True
