"""The callbacks that train settings name; refused before anything is trained where their code sets what
forwards read. Where a callback does so in another way, it is noticed when it has (watch.py).
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from spindle_cli.errors import WorkloadError
from spindle_cli.training.watch import Entry, Watch
from spindle_cli.workload.building.load import Wanted, named_function
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.introspection import Reads
from spindle_cli.workload.refuse import place_of, place_of_error
from spindle_cli.workload.step_values import StepValues
from spindle_cli.workload.types import Workload

# Those that come with Spindle, by their short names.
_OWN = {
    "tensorboard": "spindle_cli.runtime.following.loggers:TensorBoard",
    "wandb": "spindle_cli.runtime.following.loggers:WeightsAndBiases",
}
_CALLBACK = Wanted(
    "a callback",
    "a spindle_cli.Callback",
    f"Expected 'package.module:Class', 'path/to/file.py:Class', {' or '.join(map(repr, _OWN))}.",
)


ABSENT = (
    "What other devices alone have of the model is on the meta device here, without values: a checkpoint has "
    "all of it (at_checkpoint)."
)


def is_absent(error: Exception) -> bool:
    """Whether an error says that values were asked for which are not on this device."""
    return re.search(r"\bmeta (tensor|device)", str(error)) is not None


def find_callbacks(train: TrainSettings, source: str) -> tuple[Callable[[], Any], ...]:
    """Return what makes each callback that the train settings of a workload name; nothing is made yet.

    Args:
        source: of the workload; paths start from its file's folder.

    Raises:
        InputError: no such file, module or class.
        WorkloadError: the user's file fails while being imported.
    """
    return tuple(
        partial(_make, function, setting.args, f"{source}: train.callbacks[{number}]")
        for number, (setting, function) in enumerate(
            zip(train.callbacks, callback_classes(train, source), strict=True)
        )
    )


def callback_classes(train: TrainSettings, source: str) -> tuple[Callable[..., Any], ...]:
    """Return the class of each callback, or what makes one; arguments and errors as of `find_callbacks`."""
    folder = Path(source).parent if source.endswith((".yaml", ".yml", ".json")) else Path.cwd()
    return tuple(
        named_function(
            _OWN.get(setting.callback, setting.callback),
            folder,
            where=f"{source}: train.callbacks[{number}]",
            wanted=_CALLBACK,
        )
        for number, setting in enumerate(train.callbacks)
    )


def _make(function: Callable[..., Any], args: dict[str, Any], where: str) -> Any:
    try:
        return function(**args)
    except WorkloadError:
        raise
    except (TypeError, ValueError) as error:
        place = place_of_error(error)
        at = f", at {place}" if place else ""
        raise WorkloadError(
            f"{where}: cannot be made with args={args!r}: {type(error).__name__}: {error}{at}",
            hint=ABSENT if is_absent(error) else "Correct its args: keyword arguments of the class.",
        ) from error


@dataclass(frozen=True)
class _Set:
    """A name that code sets, and where."""

    name: str
    place: str


def refuse_setters(train: TrainSettings, source: str, workload: Workload) -> None:
    """Look at the callbacks that the train settings name.

    Raises:
        InputError: there is no such callback.
        WorkloadError: its code sets an attribute or name that forward reads.
    """
    classes = [cls for cls in callback_classes(train, source) if isinstance(cls, type)]
    if not classes:
        return
    watch = Watch.of(workload)
    watched = {name: entry for entry in reversed(watch.entries) for name in reversed(entry.settable)}
    declared = {
        str(place.key): value for value in StepValues.of(workload).by_name.values() for place in value.places
    }
    for cls in classes:
        for setting in _set_by(cls, workload):
            if setting.name in watched:
                raise _sets_what_is_read(cls, setting, watch, watched[setting.name])
            if setting.name in declared:
                raise WorkloadError(
                    f"{setting.place}: the callback {cls.__name__} sets {setting.name!r}, which is "
                    f"{declared[setting.name].name} of the tasks' step_values",
                    hint="Let the function of the step alone say what it is; or declare a number, and call "
                    f"run.set_value({declared[setting.name].name!r}, number).",
                )


def _sets_what_is_read(cls: type, setting: _Set, watch: Watch, entry: Entry) -> WorkloadError:
    read = watch.reads.place_of(setting.name)
    path = entry.path if setting.name == entry.key else f"{entry.path}.{setting.name}"
    return WorkloadError(
        f"{setting.place}: the callback {cls.__name__} sets {setting.name!r}, which forward reads"
        f"{f' ({read})' if read else ''}: what is traced, and other devices, would not have that",
        hint=watch.way_to_declare(path, entry.task),
    )


def _set_by(cls: type, workload: Workload) -> Iterator[_Set]:
    """Yield what a callback's code sets, but for attributes of its own."""
    reads = Reads()
    reads.of_class(cls)
    reads.call("at_start", "after_step", "at_checkpoint", "at_evaluation", "at_end")
    for task in workload.all_tasks:
        modules = [task.module] if hasattr(task, "module") else [flow.consumer for flow in task.flows]
        for module in modules:
            for part in module.modules():
                reads.of_class(type(part))
    reads.finish()
    for function in reads.functions:
        tree = _tree_of(function)
        if tree is not None:
            yield from _Setting(function, self_name=_own_name(function, workload)).names_set_in(tree)


def _own_name(function: FunctionType, workload: Workload) -> str | None:
    """Return the name of a method's own object, of a class that is no module's."""
    owner = function.__qualname__.rpartition(".")[0]
    if not owner or owner.endswith("<locals>") or not function.__code__.co_argcount:
        return None
    classes = {
        base
        for task in workload.all_tasks
        if hasattr(task, "module")
        for part in task.module.modules()
        for base in type(part).__mro__
    }
    is_of_module = any(
        base.__dict__.get(function.__name__) is function for base in classes if base is not nn.Module
    )
    return None if is_of_module else function.__code__.co_varnames[0]


def _tree_of(function: FunctionType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # its source is not there, or part of an expression
        return None


class _Setting:
    """Goes through a function's source."""

    def __init__(self, function: FunctionType, self_name: str | None) -> None:
        self._code: CodeType = function.__code__
        self._self_name = self_name
        self._globals: set[str] = set()

    def names_set_in(self, tree: ast.AST) -> Iterator[_Set]:
        """Yield all names that the function's source sets."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                self._globals.update(node.names)
        for node in ast.walk(tree):
            name = self._name_set(node)
            if name is not None:
                line = self._code.co_firstlineno + getattr(node, "lineno", 1) - 1
                yield _Set(name, place_of(self._code.co_filename, line))

    def _name_set(self, node: Any) -> str | None:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node.value, ast.Name) and node.value.id == self._self_name
            return None if is_own else node.attr
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in self._globals:
            return node.id
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            return _text(node.slice)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            return _text(node.args[1]) if len(node.args) > 1 else None
        return None


def _text(node: ast.expr) -> str | None:
    """Return what a node says, if it is a text."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
