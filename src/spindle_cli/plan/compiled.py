"""Compiling functions on arrays, and keeping what was compiled for the next run."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import numba

# numba's stubs do not know all of its options. Every number is one, and no zero's sign matters, so that the
# largest of some is found without branches.
_PLAIN: Any = {
    "fastmath": {"nnan", "nsz"},
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "error_model": "numpy",
    "_nrt": False,
}
_LOGGER = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """A function on numbers and arrays, compiled where a compiled one calls it; its Python is at `py_func`.

    It counts no references, as it makes no arrays but views of what its callers hold, and divides by zero
    without an error: both take a third of the time of compiling.
    """
    return cast("Function", numba.njit(**_PLAIN)(function))


def compiled_into_callers(function: Function) -> Function:
    """A function as `compiled` has it that becomes part of each one that calls it: handing on many arrays
    takes longer than what a short one does with them.
    """
    return cast("Function", numba.njit(forceinline=True, **_PLAIN)(function))


def compiled_and_kept(
    function: Function, calls: Sequence[ModuleType], takes_long: str | None = None
) -> Function:
    """Compile a function that Python calls, kept on disk beside its module or in the user's cache; where
    nothing can be written, compiled in each run.

    numba looks only at the file of the function itself to see whether what it has kept is still right. So
    the name that it is kept by tells the text of all modules whose functions it calls, its own among them.

    Args:
        takes_long: what is logged as a warning where nothing is kept yet, so that users know what they wait
            for.
    """
    digest = sources_digest([*calls, sys.modules[function.__module__]])
    function.__qualname__ = f"{function.__name__}_{digest}"
    try:
        compiled_function = numba.njit(cache=True, error_model="numpy")(function)
        is_kept = any(Path(str(compiled_function.stats.cache_path)).glob(f"*.{function.__qualname__}-*.nbc"))
    except RuntimeError:  # no folder to keep it in
        compiled_function, is_kept = numba.njit(error_model="numpy")(function), False
    if takes_long is not None and not is_kept:
        _LOGGER.warning(takes_long)
    return cast("Function", compiled_function)


def sources_digest(modules: Sequence[ModuleType]) -> str:
    """Return a digest of the texts of some modules' files."""
    digest = hashlib.sha256()
    for module in modules:
        if module.__file__ is not None:  # a frozen module has none, and does not change
            digest.update(Path(module.__file__).read_bytes() + b"\0")
    return digest.hexdigest()[:16]
