"""What train settings name by import path: classes and functions of the user's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

from spindle_cli.errors import WorkloadError
from spindle_cli.files.parsing import shown
from spindle_cli.workload.refuse import place_of_error


def imported(path: str, where: str) -> Callable[..., Any]:
    """What 'package.module:Name' names. The folder of the workload's file is where modules are looked for,
    besides those that are installed.

    Args:
        where: the key in the workload file, for messages.

    Raises:
        WorkloadError: there is no such module or name, it cannot be called, or its module fails.
    """
    module_name, _, name = path.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise WorkloadError(f"{where}: {shown(path)} is no import path; expected 'package.module:Name'")
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
    found = getattr(module, name, None)
    if not callable(found):
        raise WorkloadError(f"{where}: {shown(module_name)} has no class or function {shown(name)}")
    return cast("Callable[..., Any]", found)


def where_raised(error: Exception) -> str:
    """' (file:line)' of the user's code that an error came from; empty where it is not known."""
    place = place_of_error(error)
    return f" ({place})" if place else ""


def _failed(where: str, module: str, error: Exception) -> WorkloadError:
    return WorkloadError(
        f"{where}: importing {shown(module)} failed: {type(error).__name__}: {error}{where_raised(error)}"
    )
