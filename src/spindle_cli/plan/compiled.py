"""Compiling functions on arrays, and keeping what was compiled for the next run."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import numba

# numba's stubs do not know all of its options.
_PLAIN: Any = {
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "error_model": "numpy",
    "_nrt": False,
}
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """A function on numbers and arrays, compiled where a compiled one calls it; its Python is at `py_func`.

    It counts no references, as it makes no arrays but views of what its callers hold, and divides by zero
    without an error: both take a third of the time of compiling.
    """
    return cast("Function", numba.njit(**_PLAIN)(function))


def compiled_and_kept(function: Function, calls: Sequence[ModuleType]) -> Function:
    """The same for one that Python calls, kept on disk beside its module or in the user's cache; where
    nothing can be written, compiled in each run.

    numba looks only at the file of the function itself to see whether what it has kept is still right. So
    the name that it is kept by tells the text of all modules whose functions it calls, its own among them.
    """
    digest = sources_digest([*calls, sys.modules[function.__module__]])
    function.__qualname__ = f"{function.__name__}_{digest}"
    try:
        return cast("Function", numba.njit(cache=True, error_model="numpy")(function))
    except RuntimeError:  # no folder to keep it in
        return cast("Function", numba.njit(error_model="numpy")(function))


def sources_digest(modules: Sequence[ModuleType]) -> str:
    """Of the files of some modules, their texts together."""
    digest = hashlib.sha256()
    for module in modules:
        if module.__file__ is not None:  # a frozen module has none, and does not change
            digest.update(Path(module.__file__).read_bytes() + b"\0")
    return digest.hexdigest()[:16]
