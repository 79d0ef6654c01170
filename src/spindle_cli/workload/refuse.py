"""Where in the user's code something went wrong, and the refusals that say so."""

from __future__ import annotations

import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

from spindle_cli.errors import WorkloadError

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = Path(__file__).parents[1]
_OURS = f"{_PACKAGE}{os.sep}"
_ZOO = f"{_PACKAGE / 'zoo'}{os.sep}"  # workloads like any user's
# By which torch hands on calls to what watches or changes them.
_HOOKS = ("__torch_function__", "__torch_dispatch__")
_STAND_INS: set[CodeType] = set()
# Where an analysis begins: what has called it is no part of the model.
_ENTRY = str(_PACKAGE / "analysis" / "analyse.py")
# What torch says of a compiled function that is traced.
_OF_DYNAMO = "symbolically trace a dynamo-optimized function"
COMPILE_OPERATORS = "operators are compiled by `compile: inductor` under `train` in the workload file"
_STDLIB = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True)
class Frame:
    """Where code of the user's was: which function's, and in which line of its file."""

    code: CodeType
    line: int


def refusal(task: str, what: str, place: str | None, hint: str | None = None) -> WorkloadError:
    """Return a `WorkloadError` that names the task and the place in the user's code."""
    where = f"{place}: " if place else ""
    return WorkloadError(f"{where}task {task!r}: {what}", hint=hint)


def sparse_gradient(task: str, parameter: str) -> WorkloadError:
    """Return the refusal of a parameter whose gradient has some rows alone."""
    return WorkloadError(
        f"task {task!r}: the gradient of {parameter!r} is sparse (sparse=True), and gradients are summed "
        "dense",
        hint="Leave sparse=True out: SGD and Adagrad do the same with dense gradients. `spindle plan` has "
        "the rows that a batch uses summed alone where that is faster.",
    )


def refuse_compiled(task: str, error: Exception) -> WorkloadError | None:
    """Return the refusal of a forward that calls what torch.compile has made of a function; None for what
    else a trace has met.
    """
    if _OF_DYNAMO not in str(error):
        return None
    return refusal(
        task,
        "forward calls what torch.compile has made of a function, which a trace cannot follow",
        place_of_error(error),
        f"Call the function itself; {COMPILE_OPERATORS}. Or compile it in the workload's own file, or where "
        "the workload is built: there torch.compile is left out by itself.",
    )


def is_of_the_user(code: CodeType) -> bool:
    """Whether code is neither torch's, nor Python's, nor our own."""
    return _origin(code.co_filename)[0] is not _Origin.NOBODY


def is_file_of_the_user(file: str) -> bool:
    """Whether a file of code is the user's own: of no package that is installed, nor Python's or ours."""
    return _origin(file)[0] is _Origin.USER


def frames_of_error(error: BaseException) -> tuple[Frame, ...]:
    """Return the frames that an exception came through, the innermost last."""
    frames: list[Frame] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(Frame(trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    return tuple(frames)


def frames_of_caller() -> tuple[Frame, ...]:
    """Return the frames on the present stack, inside the analysis, the innermost last."""
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _ENTRY:
        frames.append(Frame(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(reversed(frames))


def place_of_error(error: BaseException) -> str | None:
    """'file:line' of the innermost frame of the user's own code that an exception came through."""
    frames: list[tuple[str, int]] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return _innermost(reversed(frames))


def place_of_caller() -> str | None:
    """'file:line' of the innermost frame of the user's own code on the present stack, inside the analysis."""
    frames = _frames(sys._getframe(1))
    return _innermost(itertools.takewhile(lambda frame: frame[0] != _ENTRY, frames))


def place_inside() -> str | None:
    """'file:line' of the innermost frame of the user's own code that was called, however indirectly, by this
    package's; None where torch's own code was.
    """
    return _innermost(_frames_inside(sys._getframe(1)))


def _frames_inside(frame: FrameType | None) -> Iterable[tuple[str, int]]:
    """Yield the frames from the innermost that is not ours to the next of ours, without those by which calls
    to torch go through this package.
    """
    is_first = True
    while frame is not None:
        if is_ours(frame.f_code.co_filename):
            while frame.f_back is not None and is_ours(frame.f_back.f_code.co_filename):
                frame = frame.f_back
            if not (is_first or frame.f_code.co_name in _HOOKS or frame.f_code in _STAND_INS):
                return
        else:
            yield frame.f_code.co_filename, frame.f_lineno
        is_first, frame = False, frame.f_back


def stand_in(code: CodeType) -> CodeType:
    """Remember that the user's code calls this code of ours in the place of a function of torch's."""
    _STAND_INS.add(code)
    return code


def is_ours(file: str) -> bool:
    return file.startswith(_OURS) and not file.startswith(_ZOO)


def _frames(frame: FrameType | None) -> Iterable[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def place_of(file: str, line: int) -> str:
    """'file:line', relative to the current folder if it is inside it."""
    folder = os.getcwd()  # noqa: PTH109 - asked for every operator that is recorded
    return f"{file.removeprefix(folder + os.sep)}:{line}"


def _innermost(frames: Iterable[tuple[str, int]]) -> str | None:
    """Return the first frame of the user's own; failing that, of an installed library that is not torch."""
    library: str | None = None
    for file, line in frames:
        origin, name = _origin(file)
        if origin is _Origin.USER:
            return place_of(file, line)
        if origin is _Origin.LIBRARY:
            library = library or f"{name}:{line}"
    return library


class _Origin(Enum):
    """Whose a file of code is; NOBODY: torch's, Python's, our own, or made while running."""

    USER = auto()
    LIBRARY = auto()
    NOBODY = auto()


@cache
def _origin(file: str) -> tuple[_Origin, str]:
    """Whose a file is, and as what it is installed."""
    if file.startswith(("<", _TORCH)) or is_ours(file):
        return _Origin.NOBODY, file
    installed = re.split(r"(?:site|dist)-packages[/\\]", file)
    if len(installed) > 1:
        return _Origin.LIBRARY, installed[-1]
    return (_Origin.NOBODY if file.startswith(_STDLIB) else _Origin.USER), file
