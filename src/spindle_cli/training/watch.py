"""Notice that what forwards read was changed from outside of them: by a callback, a dataset, a script.

Between operators a trace has what was there when it was traced; in an operator the change is one of this
process alone. Either way another model would be trained than in plain PyTorch, so the run ends. What a
forward changes itself, while it runs, is none of this.
"""

from __future__ import annotations

import contextvars
import dis
import itertools
import operator
import os
import re
import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.load import built_modules, modules_of, settled_module_name
from spindle_cli.workload.graph import root_of
from spindle_cli.workload.introspection import (
    ASKS_ENVIRONMENT,
    OF_ENVIRONMENT,
    OF_MODULES,
    Environment,
    Reads,
    fields_of,
    is_users,
    is_users_own,
)
from spindle_cli.workload.step_values import HELD_AS, StepValues, find_places, is_number
from spindle_cli.workload.types import FlowTask, Task, Workload

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CODE = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    property,
    staticmethod,
    classmethod,
)
_DEPTH = 4
_MOST_ENTRIES = 256  # of a list or dict; of longer ones it is seen that they are others, or grow
_MOST_ELEMENTS = 4096  # of an array
# How code sets names, attributes and (of no name) entries; by which methods it fills lists, dicts and sets.
_SETTING = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_SUBSCR")
_FILLING = ("append", "add", "update", "setdefault", "extend", "insert", "pop", "popitem", "clear", "remove")
_TAKES_GRADIENT = operator.attrgetter("requires_grad")
_GONE = object()
_NOWHERE = nn.Module()
_CHANGED = object()  # in the place of what it was, where that is not known any more
_DECLARE = (
    "A number that changes while the model is trained is declared: "
    "Task(..., step_values={{{path!r}: function}}), function(step) giving it for a step counted from 0; or "
    "{path!r}: number, and run.set_value({name!r}, number) in a callback."
)
_KEEP = (
    "A number that changes while the model is trained is one that a task can name: keep it as an attribute "
    "of the task's module (self.{name} = 0.0), which forward reads, or as a name of the Python module. Then "
    "declare it: Task(..., step_values={{{name!r}: function}}), function(step) giving it for a step counted "
    "from 0; or {name!r}: number, and run.set_value('TASK/{name}', number) in a callback."
)
_FIXED = (
    "Let it stay what it is while the run lasts. Numbers may change that tasks declare (Task.step_values): "
    "multiply what is to be on or off by one."
)


_OF_DATA = (
    "What changes from epoch to epoch belongs into the dataset's set_epoch(epoch). A number that changes by "
    "the step is forward's (Task(..., step_values={...})), which does what depends on it with the batch."
)


@dataclass(slots=True)
class Entry:
    """A name whose value is watched. `path`: how `step_values` names it, from the task's module. `held`: what
    it was. `seen`: what told of its inside; None: nothing can change there. `is_buffer`: what
    runs around passes may change it, too. `is_of_data`: a dataset or collate reads it.
    """

    holder: Mapping[str, Any]
    key: str
    path: str
    task: str
    held: Any
    seen: Any
    is_buffer: bool = False
    is_of_data: bool = False

    @property
    def settable(self) -> tuple[str, ...]:
        """The names by which code sets it, or an entry of a dict, of what has this name alone: none of what
        passes change by themselves, of modes, functions and layers, and of data.
        """
        is_unlike = self.is_buffer or self.is_of_data or self.key == "training"
        if is_unlike or self.held is _GONE or callable(self.held):
            return ()
        inside = self.seen if isinstance(self.seen, dict) else ()
        return (self.key, *(key for key in inside if isinstance(key, str)))

    def now(self) -> Any:
        """Return the present value."""
        return self.holder.get(self.key, _GONE)

    def record(self) -> None:
        """Take it as it is now."""
        self.held = self.now()
        self.seen = _inside(self.held, _DEPTH)

    def has_changed(self) -> bool:
        """Whether it is another now."""
        value = self.now()
        if value is self.held:
            return self.seen is not None and bool(_inside(value, _DEPTH) != self.seen)
        if self.seen is None and isinstance(value, (*_PLAIN, tuple)) and type(value) is type(self.held):
            return bool(value != self.held and repr(value) != repr(self.held))
        if isinstance(value, Tensor | nn.Module) or isinstance(self.held, Tensor | nn.Module):
            return True
        return self.seen is None or bool(_inside(value, _DEPTH) != self.seen)


@dataclass
class Watch:
    """Everything that the forwards of a workload read and that is to stay as it is.

    `roots`: the tasks' modules, by name. `trains`: of each parameter, whether it takes a gradient.
    """

    reads: Reads
    values: StepValues
    roots: Mapping[str, nn.Module]
    entries: list[Entry] = field(default_factory=list)
    trains: list[tuple[str, str, nn.Parameter, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._buffers = [entry for entry in self.entries if entry.is_buffer]
        self._parameters = [parameter for _, _, parameter, _ in self.trains]
        self._trains = [trains for *_, trains in self.trains]
        self._sort_out()

    @classmethod
    def of(cls, workload: Workload, source: str | None = None) -> Watch:
        """Note what forward reads as it is now.

        Args:
            workload: the build that is trained.
            source: of the workload, where code of the user's may hold other builds of it, and change those;
                None: there are none, or they are others' to watch.
        """
        held = modules_of(workload) if source is None else built_modules(source)
        reads = Reads()
        for _, _, module in held:
            for part in module.modules():
                reads.of_module(part)
        reads.finish()
        values = StepValues.of(workload)
        finder = _Finder(reads, values)
        for task, name, module in held:
            finder.look_into(task, name, module)
        finder.look_around()
        of_data = [entry for task in workload.all_tasks for entry in _read_by_data(task, values)]
        roots = {task.name: root_of(task) for task in workload.all_tasks}
        return cls(reads, values, roots, finder.entries + of_data, finder.trains)

    def check_between(self, step: int) -> None:
        """See whether a buffer or a declared number was changed since the last step, in front of a step
        (counted from 0): what belongs to the step itself changes these next, and `check` sees all else.

        Raises:
            WorkloadError: something was.
        """
        for entry in self._buffers:
            if entry.has_changed():
                raise self._refusal(entry, step)
        self._require_declared(step)

    def check(self, step: int) -> None:
        """See whether anything is another than it was; in front of a pass of a step, counted from 0.

        Raises:
            WorkloadError: something is.
        """
        for entry in itertools.chain(self._other_plain(), self._inner):
            if entry.has_changed():
                raise self._refusal(entry, step)
        self._require_declared(step)
        if list(map(_TAKES_GRADIENT, self._parameters)) == self._trains:
            return
        for task, name, parameter, trains in self.trains:
            if parameter.requires_grad is not trains:
                what = "takes no gradient any more" if trains else "takes a gradient now"
                raise WorkloadError(
                    f"before step {step + 1}: task {task!r}: the parameter {name!r} {what}, which was "
                    "decided when the workload was profiled and planned",
                    hint="Let the workload be built with what is to be trained, and profile and plan it "
                    "again; a run of it begins with this one's values by `init_from`.",
                )

    def record(self) -> None:
        """Take what passes have changed."""
        others = [entry for entry in self._other_plain() if not entry.is_of_data]
        for entry in itertools.chain(others, self._inner):
            if not entry.is_of_data:
                entry.record()
        if others:
            self._sort_out()

    def _sort_out(self) -> None:
        """Tell names in dicts whose values have no inside, which are looked at in every step at once, from
        all others.
        """
        is_plain = [entry.seen is None and isinstance(entry.holder, dict) for entry in self.entries]
        self._plain = list(itertools.compress(self.entries, is_plain))
        self._inner = [entry for entry, plain in zip(self.entries, is_plain, strict=True) if not plain]
        self._holders = [entry.holder for entry in self._plain if isinstance(entry.holder, dict)]
        self._keys = [entry.key for entry in self._plain]
        self._held = [entry.held for entry in self._plain]

    def _other_plain(self) -> list[Entry]:
        """Names in dicts that have another object now, most often none; `_inner` are looked at one by one."""
        values: Iterable[Any] = map(dict.get, self._holders, self._keys, itertools.repeat(_GONE))
        return list(itertools.compress(self._plain, map(operator.is_not, values, self._held)))

    def record_buffers(self) -> None:
        """Take what was changed in buffers around passes."""
        for entry in self._buffers:
            entry.record()

    def _require_declared(self, step: int) -> None:
        """Require declared numbers to be what their functions of the step give."""
        for value in self.values.by_name.values():
            for place in value.places:
                if place.get() != value.now:
                    raise WorkloadError(
                        f"before step {step + 1}: {value.name} is {place.get()!r:.80}; its step_values give "
                        f"{value.now:g} for it, and somebody else has set it",
                        hint="Let the function of the step alone say what it is; or declare a number, and "
                        f"call run.set_value({value.name!r}, number) in a callback.",
                    )

    def _refusal(self, entry: Entry, step: int) -> WorkloadError:
        path, before, now = _told(entry)
        place = self.reads.place_of(path.rpartition(".")[2].rpartition(":")[2])
        where = f"{place}: " if place else ""
        of_task = f"task {entry.task!r}: " if entry.task else ""
        number = is_number(before) and is_number(now) and not entry.is_buffer
        said = f"was {_shown(before)} when it was traced and is {_shown(now)}"
        if before is _CHANGED:
            said = f"is {_shown(now)} with another content than when it was traced"
        if entry.is_of_data:
            said = said.replace("when it was traced", "at first")
            return WorkloadError(
                f"{of_task}the data read {path}, which {said} before step {step + 1}: it was changed from "
                "outside, and batches are read ahead, by other processes too",
                hint=_OF_DATA,
            )
        return WorkloadError(
            f"{where}{of_task}forward reads {path}, which {said} before step {step + 1}: it was changed from "
            "outside, and what is traced, and other devices, do not have that",
            hint=self.way_to_declare(path, entry.task) if number else _FIXED,
        )

    def way_to_declare(self, path: str, task: str) -> str:
        """Return what to do where code sets a number that forward reads: a path that a declaration takes is
        named; a variable of a function, say, has none. `task`: whose module holds it; '' for what none does.
        """
        try:
            find_places(path, self.roots.get(task, _NOWHERE), "")
        except WorkloadError:
            return _KEEP.format(name=re.split("[.:]", path)[-1])
        return _DECLARE.format(path=path, name=f"{task or 'TASK'}/{path}")


def _read_by_data(task: Task | FlowTask, values: StepValues) -> list[Entry]:
    """Return what the user's own code that makes a task's batches reads and does not set itself."""
    reads = Reads(follows=is_users_own)
    held = list(_own_objects((task.dataset, task.eval_dataset, task.collate)))
    for value in held:
        reads.of_object(value)
    reads.call("set_epoch", "state_dict", "load_state_dict")
    reads.finish()
    finder = _Finder(reads, values)
    for value in held:
        if not isinstance(value, types.FunctionType | types.MethodType):
            finder.look_into_object(value, type(value).__name__, task.name)
    finder.look_around()
    steps = [step for code in reads.codes for step in dis.get_instructions(code)]
    set_here = {step.argval for step in steps if step.opname in _SETTING}
    fills = None in set_here or not reads.names.isdisjoint(_FILLING)
    entries = [
        entry for entry in finder.entries if entry.key not in set_here and (entry.seen is None or not fills)
    ]
    for entry in entries:
        entry.is_of_data = True
    return entries


def _own_objects(values: Iterable[Any], depth: int = 3) -> Iterator[Any]:
    """Yield the functions, and the objects of the user's own classes, among some and in what wraps them."""
    for value in values:
        if isinstance(value, types.FunctionType | types.MethodType) or is_users_own(type(value)):
            yield value
        elif depth and isinstance(value, Dataset):
            held = (fields_of(value) or {}).values()
            inside = (
                attribute[:_MOST_ENTRIES] if isinstance(attribute, list) else [attribute]
                for attribute in held
            )
            yield from _own_objects(itertools.chain.from_iterable(inside), depth - 1)


class _Finder:
    """Finds what is to be watched, each thing once."""

    def __init__(self, reads: Reads, values: StepValues) -> None:
        self._reads = reads
        self._declared = [place for value in values.by_name.values() for place in value.places]
        self._seen: set[tuple[int, str]] = set()
        self._inside: set[int] = set()
        self.entries: list[Entry] = []
        self.trains: list[tuple[str, str, nn.Parameter, bool]] = []

    def look_into(self, task: str, name: str, root: nn.Module) -> None:
        """Watch a module of a task, by its name from the task's, and all below it."""
        for dotted, module in root.named_modules(prefix=name):
            prefix = f"{dotted}." if dotted else ""
            self._look_at_attributes(task, prefix, module)
            buffers, parts = module._buffers, module._modules
            if isinstance(module, torch.jit.ScriptModule):  # which keeps them elsewhere, as the same tensors
                buffers, parts = dict(module.named_buffers(recurse=False)), {}
            for key in parts:
                self._watch(module, parts, key, prefix + key, task)
            for key in buffers:
                self._watch(module, buffers, key, prefix + key, task, is_buffer=True)
        for dotted, parameter in root.named_parameters(prefix=name):
            self.trains.append((task, dotted, parameter, parameter.requires_grad))

    def _look_at_attributes(self, task: str, prefix: str, module: nn.Module) -> None:
        """Watch the attributes of a module, and those of its classes, that forward reads."""
        names = self._reads.names
        is_own = is_users(type(module))
        for key, value in list(module.__dict__.items()):
            is_read = key in names if is_own else key[0] != "_" and isinstance(value, (*_PLAIN, tuple))
            if key not in OF_MODULES and not key.startswith(HELD_AS) and (is_read or key == "training"):
                self._watch(module, module.__dict__, key, prefix + key, task)
        for base in type(module).__mro__ if is_own else ():
            if base not in self._reads.classes:
                continue
            for key, value in list(base.__dict__.items()):
                is_read = isinstance(value, (*_PLAIN, *_CODE, list, dict, tuple))
                if key in names and is_read and key[:2] != "__":
                    self._watch(module, module.__dict__, key, prefix + key, task)
                    self._watch(base, base.__dict__, key, prefix + key, task)

    def look_into_object(self, value: Any, path: str, task: str) -> None:
        """Look into an object that is no module, by what it is called."""
        self._object(value, path, task)

    def look_around(self) -> None:
        """Watch names of Python modules, variables around functions, and those of the environment."""
        for around, name in list(self._reads.globals.values()):
            self._watch(
                around, around, name, f"{settled_module_name(str(around.get('__name__')))}:{name}", ""
            )
        for cls in self._reads.classes:
            for key, value in cls.__dict__.items():
                if key in self._reads.names and isinstance(value, (*_PLAIN, *_CODE)) and key[:2] != "__":
                    path = f"{settled_module_name(cls.__module__)}:{cls.__qualname__}.{key}"
                    self._watch(cls, cls.__dict__, key, path, "")
        for cell, name in self._reads.cells.values():
            self._watch(cell, _Cell(cell), name, name, "")
        for function in self._reads.functions:
            self._look_at_function(function)
        for code in self._reads.codes:
            if not ASKS_ENVIRONMENT.isdisjoint(code.co_names):
                for name in [constant for constant in code.co_consts if isinstance(constant, str)]:
                    self._watch(os.environ, Environment(), name, f"{OF_ENVIRONMENT}.{name}", "")

    def _look_at_function(self, function: types.FunctionType) -> None:
        """Watch the attributes of a function, and what its arguments are by default."""
        path = f"{settled_module_name(function.__module__)}:{function.__qualname__}"
        self._object(function, path, "")
        for name, value in _defaults(function):
            if not isinstance(value, _PLAIN):
                self._watch(function, {name: value}, name, f"{path}.{name}", "")

    def _watch(
        self,
        owner: Any,
        holder: Mapping[str, Any],
        key: str,
        path: str,
        task: str,
        *,
        is_buffer: bool = False,
    ) -> None:
        if (id(owner), key) in self._seen:
            return
        self._seen.add((id(owner), key))
        if any(_is_at(place.holder, owner, holder) and place.key == key for place in self._declared):
            return
        value = holder.get(key, _GONE)
        if isinstance(value, types.ModuleType):
            return
        if callable(value) and not is_buffer:
            self.entries.append(Entry(holder, key, path, task, value, None))
            if not isinstance(value, (*_CODE, type, nn.Module)):
                self._object(value, path, task)
            return
        # Tensors that are no buffers are moved to the device and converted, too.
        is_tensor = is_buffer or isinstance(value, Tensor)
        entry = Entry(holder, key, path, task, value, _inside(value, _DEPTH), is_tensor)
        if any(place.holder is value for place in self._declared):
            return  # a dict or list of declared numbers
        self.entries.append(entry)
        self._object(value, path, task)

    def _object(self, value: Any, path: str, task: str, depth: int = 3) -> None:
        """Watch the attributes of an object that is no tensor, module or number."""
        held = fields_of(value)
        is_plain = isinstance(value, (*_PLAIN, Tensor, nn.Module, np.ndarray, np.generic, weakref.ref))
        if held is None or is_plain or depth == 0 or id(value) in self._inside:
            return
        self._inside.add(id(value))
        for key in self._reads.names & held.keys():
            self._watch(value, held, key, f"{path}.{key}", task)


class _Cell(Mapping[str, Any]):
    """A variable of a function as a dict with one entry."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError as error:
            raise KeyError(name) from error

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 1


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a function that have a default, with that."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    yield from zip(names[len(names) - len(values) :], values, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _is_at(holder: Any, owner: Any, mapping: Mapping[str, Any]) -> bool:
    return holder is owner or holder is mapping or getattr(holder, "__dict__", None) is mapping


def _inside(value: Any, depth: int) -> Any:
    """Return what tells whether a value's inside has changed; None: it has none that could."""
    if isinstance(value, _PLAIN) or value is _GONE:
        return None
    if isinstance(value, nn.Parameter):
        return "a parameter"  # which updates change
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if isinstance(value, contextvars.ContextVar):
        return "variable", _entry(value.get(_GONE), depth)
    if isinstance(value, np.generic):
        return "number", repr(value.item())
    if isinstance(value, np.ndarray):
        is_compared = value.size <= _MOST_ELEMENTS and value.dtype != object
        return value.tobytes() if is_compared else (id(value), value.shape)
    if isinstance(value, list | tuple | set | frozenset | Mapping) and not isinstance(value, nn.Module):
        return _inside_container(value, depth)
    return None if isinstance(value, type | types.FunctionType) else id(value)


def _inside_container(value: Mapping[Any, Any] | Collection[Any], depth: int) -> Any:
    """Do what `_inside` does, for a container: by its entries, `depth` levels deep."""
    if depth == 0 or len(value) > _MOST_ENTRIES:
        return id(value), len(value)
    if isinstance(value, Mapping):
        return {key: _entry(item, depth) for key, item in value.items()}
    if isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value):
        return None
    items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    return type(value), [_entry(item, depth) for item in items]


def _entry(value: Any, depth: int) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # not-a-number is no other than it was
    return _inside(value, depth - 1)


def _told(entry: Entry) -> tuple[str, Any, Any]:
    """Return what has changed, what it was, and what it is, for people; in a dict, of the entry there."""
    value = entry.now()
    if isinstance(value, Mapping) and isinstance(entry.seen, dict):
        for key, item in value.items():
            before = entry.seen.get(key, _GONE)
            if isinstance(key, str) and before != _entry(item, _DEPTH):
                return f"{entry.path}.{key}", _noted(before), item
    return entry.path, entry.held if entry.held is not value else _CHANGED, value


def _noted(before: Any) -> Any:
    """Return a number as `_entry` has noted it."""
    is_number_noted = isinstance(before, tuple) and before[0] in (int, float)
    return before[0](before[1]) if is_number_noted else _CHANGED if before is not _GONE else before


def _shown(value: Any) -> str:
    if value is _GONE:
        return "not there"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    name = getattr(value, "__qualname__", None)
    return f"{value!r:.60}" if name is None else f"the function {name}"
