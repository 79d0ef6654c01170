"""What train settings name by import path: classes and functions of the user's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from spindle_cli.errors import WorkloadError
from spindle_cli.files.parsing import shown
from spindle_cli.workload.building.source import Wanted, import_file
from spindle_cli.workload.refuse import place_of_error

_CODE = Wanted(
    "a class or function", "what is asked for", "Expected 'package.module:Name' or 'path/to/file.py:Name'."
)


def imported(path: str, where: str) -> Callable[..., Any]:
    """What 'package.module:Name' or 'path/to/file.py:Name' names. The folder of the workload's file is where
    modules and files are looked for, besides where installed modules are.

    Args:
        where: the key in the workload file, for messages.

    Raises:
        WorkloadError: there is no such module, file or name, it cannot be called, or its module fails.
    """
    module_name, _, name = path.rpartition(":")
    if module_name.endswith(".py"):
        return _called(_module_of(module_name, where), name, module_name, where)
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise WorkloadError(
            f"{where}: {shown(path)} is no import path; expected 'package.module:Name' or "
            "'path/to/file.py:Name'"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise WorkloadError(
                f"{where}: there is no module {shown(module_name)}",
                hint="Install it, or put its file beside the workload file.",
            ) from error
        raise _failed(where, module_name, error) from error
    except Exception as error:
        raise _failed(where, module_name, error) from error
    return _called(module, name, module_name, where)


def _called(module: ModuleType, name: str, module_name: str, where: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found):
        raise WorkloadError(f"{where}: {shown(module_name)} has no class or function {shown(name)}")
    return cast("Callable[..., Any]", found)


def _module_of(file: str, where: str) -> ModuleType:
    """The module of a Python file: which of two files of one name is meant, nobody can tell."""
    places = [Path(folder or ".") / file for folder in sys.path]
    found = sorted({place.resolve() for place in places if place.is_file()})
    if not found:
        raise WorkloadError(
            f"{where}: there is no file {shown(file)}",
            hint="Its path starts from the workload file's folder.",
        )
    if len(found) > 1:
        raise WorkloadError(
            f"{where}: {shown(file)} may be {' or '.join(map(str, found))}",
            hint="Give it a name of its own, or its whole path.",
        )
    return import_file(found[0], where, _CODE)


def where_raised(error: Exception) -> str:
    """' (file:line)' of the user's code that an error came from; empty where it is not known."""
    place = place_of_error(error)
    return f" ({place})" if place else ""


def _failed(where: str, module: str, error: Exception) -> WorkloadError:
    return WorkloadError(
        f"{where}: importing {shown(module)} failed: {type(error).__name__}: {error}{where_raised(error)}"
    )
