"""From what a user names a workload by to the function that builds it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from spindle_cli.errors import InputError, WorkloadError
from spindle_cli.files.parsing import shown
from spindle_cli.workload.building.handed_out import noting_arrays
from spindle_cli.workload.building.uncompiled import functions_uncompiled
from spindle_cli.workload.file import TrainSettings, WorkloadFile
from spindle_cli.workload.init_from import InitFrom
from spindle_cli.workload.one_process import show_one_process
from spindle_cli.workload.refuse import place_of_error

_FILE_MODULE = "spindle_workload_"


@dataclass(frozen=True)
class Wanted:
    """What a name is to name, for messages."""

    what: str
    returns: str
    expected: str


_WORKLOAD = Wanted(
    "a workload",
    "a spindle_cli.Workload",
    "Expected a workload YAML file, 'package.module:function' or 'path/to/file.py:function'.",
)


@dataclass(frozen=True)
class Source:
    """A function that builds a workload, its arguments, and the training settings and the files of initial
    values that go with it.
    """

    text: str
    build: Callable[..., Any]
    args: dict[str, Any] = field(default_factory=dict)
    train: TrainSettings = field(default_factory=TrainSettings)
    init_from: InitFrom = field(default_factory=InitFrom)


def resolve(source: str, *, relative_to: Path | None = None) -> Source:
    """Find a workload's function: of a YAML file, or 'package.module:function' / 'path/to/file.py:function'.

    Args:
        source: as the user gave it.
        relative_to: folder that relative paths start from; the current one if None.

    Raises:
        InputError: no such file, module or function, or a malformed YAML file.
        WorkloadError: the user's file fails while being imported.
    """
    folder = relative_to or Path.cwd()
    if source.endswith((".yaml", ".yml", ".json")):
        path = folder / source
        file = WorkloadFile.read(path)
        _make_importable(path.parent)
        function = named_function(file.model, path.parent, where=f"{path}: model")
        init_from = InitFrom(str(path), path.parent, file.init_from)
        return Source(source, function, file.args, file.train, init_from)
    return Source(source, named_function(source, folder, where="workload"))


def locate(source: str, other_folders: tuple[Path, ...] = ()) -> str:
    """Return a workload's source with its path made absolute: looked for in the current folder, then in the
    others.

    What is not a file, 'package.module:function', is left as it is.

    Raises:
        InputError: the file is in none of the folders.
    """
    name, colon, function = source.rpartition(":")
    path, suffix = (Path(name), colon + function) if name.endswith(".py") else (Path(source), "")
    if path.suffix not in (".py", ".yaml", ".yml", ".json"):
        return source
    folders = (Path.cwd(), *other_folders)
    for folder in folders:
        if (folder / path).is_file():
            return str(folder / path) + suffix
    looked = " or ".join(str(folder) for folder in dict.fromkeys(folders))
    raise InputError(
        f"the workload {source!r} is not there (looked in {looked})",
        hint="Say where it is now with --workload.",
    )


def named_function(name: str, folder: Path, *, where: str, wanted: Wanted = _WORKLOAD) -> Callable[..., Any]:
    """Return what 'package.module:function' or 'path/to/file.py:function' names; relative paths start from
    `folder`.

    Raises:
        InputError: no such file, module or function.
        WorkloadError: the user's file fails while being imported.
    """
    show_one_process()
    with noting_arrays(), functions_uncompiled():
        return _named_function(name, folder, where, wanted)


def _named_function(name: str, folder: Path, where: str, wanted: Wanted) -> Callable[..., Any]:
    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name or not function_name:
        raise InputError(f"{where}: {name!r} is not {wanted.what}", hint=wanted.expected)
    if module_name.endswith(".py"):
        module = import_file(folder / module_name, where, wanted)
    elif not all(part.isidentifier() for part in module_name.split(".")):
        raise InputError(
            f"{where}: {shown(module_name)} is neither a module's name nor that of a file that ends in .py",
            hint=wanted.expected,
        )
    else:
        module = _import_module(module_name, folder, where, wanted)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(
            f"{where}: {module_name!r} has no function {function_name!r}",
            hint=f"Name a function that returns {wanted.returns}.",
        )
    return cast("Callable[..., Any]", function)  # whoever calls it checks what it returns


def settled_module_name(name: str) -> str:
    """Return a module's name without what we put before that of a workload file, which depends on its folder.

    'layers' for layers.py, wherever it is: a copied workload is the same workload.
    """
    return re.sub(rf"^{_FILE_MODULE}[0-9a-f]{{12}}_", "", name)


def _import_module(name: str, folder: Path, where: str, wanted: Wanted) -> ModuleType:
    _make_importable(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise InputError(f"{where}: there is no module {name!r}", hint=wanted.expected) from error
        raise _import_failed(name, error) from error
    except Exception as error:
        raise _import_failed(name, error) from error


def import_file(path: Path, where: str, wanted: Wanted) -> ModuleType:
    """Import a Python file as a module of its own; the files beside it can be imported by it.

    Raises:
        InputError: there is no such file.
        WorkloadError: it fails while being imported.
    """
    if not path.is_file():
        raise InputError(f"{where}: {path}: no such file", hint=wanted.expected)
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"{_FILE_MODULE}{digest}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    _make_importable(path.parent)
    if _is_imported_as(path.stem) == path:  # what others import by its name is the same module
        sys.modules[name] = sys.modules[path.stem]
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    is_named = path.stem not in sys.modules and _found_as(path.stem) == path
    if is_named:
        sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        if is_named:
            del sys.modules[path.stem]
        raise _import_failed(str(path), error) from error
    return module


def _is_imported_as(name: str) -> Path | None:
    """Return the file of a module that is imported by a name."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return None if file is None else Path(file).resolve()


def _found_as(name: str) -> Path | None:
    """Return the file that would be imported by a name."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()


def _make_importable(folder: Path) -> None:
    text = str(folder.resolve())
    if text not in sys.path:
        sys.path.append(text)


def _import_failed(name: str, error: Exception) -> WorkloadError:
    place = place_of_error(error)
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    where = f"{place}: " if place else ""
    return WorkloadError(f"{where}importing {name!r} failed: {type(error).__name__}: {error}")
