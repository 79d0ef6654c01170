"""How a batch becomes the arguments of a task's forward: by name, by order, or whole.

A batch is a flat dict of tensors wherever it is split, packed and sent. What the dataset gives may be a tuple
or a dataclass, or have dicts inside: its *form* is found on the first batch, and all others have it too.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Number
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.refuse import place_of, place_of_caller, refusal
from spindle_cli.workload.step_values import arguments_of_step
from spindle_cli.workload.types import FlowTask, Task

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NUMBERS = (Tensor, np.ndarray, np.generic, Number)
_TOKENS = "Tokenise texts in the dataset or in `collate`; leave what forward does without out of the items."


class LeftOut:
    """Stands for a text or another object inside of what forward takes whole: raises when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise WorkloadError(
            f"{place_of_caller() or 'forward'}: forward uses {self._name!r} of the batch, which is no tensor",
            hint=_TOKENS,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._refuse()

    __getitem__ = __iter__ = __len__ = __bool__ = __call__ = __contains__ = _refuse
    __fx_create_arg__ = _refuse  # what an operator or a function of torch's is given
    __str__ = __eq__ = _refuse
    __hash__ = object.__hash__


@dataclass(frozen=True)
class Form:
    """A value of a batch. `parts`: of what it is made, by key, position or attribute.

    Attributes:
        kind: its class; None: it is the field `name`, or (without one) None itself.
    """

    kind: type | None
    name: str | None = None
    parts: tuple[tuple[Any, Form], ...] = ()

    def value(self, fields: Mapping[str, Any]) -> Any:
        """Return the argument that is made of these fields."""
        if self.kind is None:
            return None if self.name is None else fields[self.name]
        if self.kind is LeftOut:
            return LeftOut(str(self.name))
        made = {key: part.value(fields) for key, part in self.parts}
        if dataclasses.is_dataclass(self.kind) or hasattr(self.kind, "_fields"):
            return self.kind(**made)
        if issubclass(self.kind, Mapping):
            return made if self.kind is dict else self.kind(made)  # type: ignore[call-arg]  # a kind of mapping
        return self.kind(made.values())  # type: ignore[call-arg]  # a kind of tuple

    def __str__(self) -> str:
        if self.kind is None or self.kind is LeftOut:
            return {None: "None", LeftOut: "text"}[self.kind] if self.name is None or self.kind else "tensor"
        inner = ", ".join(f"{key}: {part}" if isinstance(key, str) else f"{part}" for key, part in self.parts)
        return f"{self.kind.__name__}({inner})"


@dataclass(frozen=True)
class Arguments:
    """The arguments that a task's forward is given of a batch. `left_out`: names of texts and other objects
    that it does not take.
    """

    args: tuple[Form, ...] = ()
    kwargs: tuple[tuple[str, Form], ...] = ()
    left_out: tuple[str, ...] = field(default=(), compare=False)

    @property
    def are_fields(self) -> bool:
        """Whether each argument is the field of its name."""
        return not self.args and all(form.kind is None and form.name == key for key, form in self.kwargs)

    def call(self, function: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
        """Call forward, or what stands for it."""
        made = {key: form.value(fields) for key, form in self.kwargs}
        return function(*(form.value(fields) for form in self.args), **made)

    def __str__(self) -> str:
        return ", ".join([*map(str, self.args), *(f"{key}: {form}" for key, form in self.kwargs)])


_arguments_by_task: WeakKeyDictionary[Task | FlowTask, Arguments] = WeakKeyDictionary()


def arguments_of(task: Task | FlowTask) -> Arguments | None:
    """Return what the task's batches were found to be in this process; None: none was read."""
    return _arguments_by_task.get(task)


def same_arguments(task: Task | FlowTask, alike: Task | FlowTask) -> None:
    """Let a task's batches be what those of another task, like this one, were found to be."""
    if alike in _arguments_by_task:
        _arguments_by_task[task] = _arguments_by_task[alike]


def call_forward(task: Task, fields: Mapping[str, Any], function: Callable[..., Any] | None = None) -> Any:
    """Call a task's module, or a function in its place, with a batch as it comes from `fields_of`, and with
    the numbers of the step that are arguments of its forward.
    """
    call = partial(task.module if function is None else function, **arguments_of_step(task.module))
    arguments = _arguments_by_task.get(task)
    return call(**fields) if arguments is None else arguments.call(call, fields)


def fields_of(task: Task | FlowTask, batch: Any) -> dict[str, Any]:
    """Return the fields of a batch as the dataset or the task's collate gives it.

    Raises:
        WorkloadError: forward does not take it, or it has another form than batches before.
    """
    maker = _Maker(task)
    arguments = maker.arguments(batch)
    earlier = _arguments_by_task.setdefault(task, arguments)
    if earlier != arguments:
        raise WorkloadError(
            f"task {task.name!r}: batches have other parts from batch to batch: {earlier}, and {arguments}",
            hint="Let every batch have the same fields, whatever its samples. Where a list has an entry for "
            "each sample, pad to one shape with a mask for what is padding, and stack.",
        )
    return maker.fields


def lengths_of_lists(batch: Any) -> Iterator[int]:
    """Yield the lengths of all lists and tuples of tensors in a batch, from the outside in."""
    parts = _parts(batch)
    if parts is None or _is_object(batch):
        return
    if isinstance(batch, list | tuple):
        yield len(batch)
    for _, part in parts:
        yield from lengths_of_lists(part)


def _fits_in_order(
    positional: Sequence[inspect.Parameter], batch: Sequence[Any], data: Sequence[Any]
) -> bool:
    """Whether the tensors of a batch, `data`, are what forward takes by position."""
    required = [p for p in positional if p.default is p.empty]
    if not len(required) <= len(data) <= len(positional):
        return False
    is_text_first = not all(map(_is_object, batch[len(data) :]))
    if is_text_first and len(batch) <= len(positional):
        return False  # a text before a tensor: forward may take it, by order
    if any(map(_is_for_texts, positional[: len(batch)])):
        return False
    return all(map(_is_for_tensors, positional[: len(data)]))


class _Maker:
    """Makes arguments of a batch, and its fields."""

    def __init__(self, task: Task | FlowTask) -> None:
        self._task = task
        self.fields: dict[str, Any] = {}
        self._left_out: list[str] = []
        self._parameters: list[inspect.Parameter] | None = None
        if isinstance(task, Task):
            self._parameters = list(inspect.signature(type(task.module).forward).parameters.values())[1:]

    def arguments(self, batch: Any) -> Arguments:
        """Find the arguments that forward takes of a batch."""
        if self._parameters is None:
            if not isinstance(batch, Mapping):
                raise self._no_batch(batch)
            return self._by_name(batch, {str(flow.producer) for flow in self._flows()})
        if isinstance(batch, Mapping) or dataclasses.is_dataclass(batch):
            return self._named(dict(batch) if isinstance(batch, Mapping) else _attributes(batch), batch)
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            entries = dict(zip(batch._fields, batch, strict=True))
            takes = {p.name for p in self._parameters}
            if {key for key, value in entries.items() if not _is_object(value)} <= takes:
                return self._by_name(entries, takes)
        if isinstance(batch, list | tuple):
            return self._by_order(batch)
        raise self._no_batch(batch)

    def _flows(self) -> Iterator[Any]:
        assert isinstance(self._task, FlowTask)
        return (flow for flow in self._task.flows if isinstance(flow.producer, str))

    def _no_batch(self, batch: Any) -> WorkloadError:
        return WorkloadError(
            f"task {self._task.name!r}: a batch is a {type(batch).__name__}, expected a dict from names to "
            "tensors",
            hint="Let the dataset's items be dicts whose keys are the names of forward's arguments.",
        )

    def _named(self, entries: Mapping[Any, Any], batch: Any) -> Arguments:
        """Find how a batch that has names is passed: they are forward's arguments, or forward takes it
        whole.
        """
        assert self._parameters is not None
        takes = {p.name for p in self._parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        any_name = any(p.kind is p.VAR_KEYWORD for p in self._parameters)
        whole = self._only_argument()
        if whole is not None and not any_name and not takes & entries.keys():
            return self._whole(whole, batch)
        return self._by_name(entries, takes)

    def _by_name(self, entries: Mapping[Any, Any], takes: set[str]) -> Arguments:
        kwargs: list[tuple[str, Form]] = []
        for key, value in entries.items():
            name = str(key)
            if _is_object(value):
                if name in takes:
                    raise self._takes_text(name, value)
                self._left_out.append(name)
            elif value is not None or name in takes:
                kwargs.append((name, self._form(name, value)))
        return Arguments((), tuple(kwargs), tuple(self._left_out))

    def _by_order(self, batch: Sequence[Any]) -> Arguments:
        """Find how a batch that is a sequence is passed: its tensors are forward's arguments, in order, or
        forward takes it whole.
        """
        assert self._parameters is not None
        positional = [p for p in self._parameters if p.kind in _POSITIONAL]
        more = next((p for p in self._parameters if p.kind is p.VAR_POSITIONAL), None)
        if more is not None:
            rest = [f"{more.name}_{number}" for number in range(len(positional), len(batch))]
            names = [*(p.name for p in positional), *rest][: len(batch)]
            return Arguments(tuple(map(self._form, names, batch)), (), tuple(self._left_out))
        data = [value for value in batch if not _is_object(value)]
        if _fits_in_order(positional, batch, data):
            texts = (f"entry {number}" for number, value in enumerate(batch) if _is_object(value))
            self._left_out.extend(texts)
            given = zip(positional, data, strict=False)
            kwargs = tuple((p.name, self._form(p.name, value)) for p, value in given)
            return Arguments((), kwargs, tuple(self._left_out))
        whole = self._only_argument()
        if whole is not None and len(data) > 1 and not any(map(_is_for_tensors, positional[1:])):
            return self._whole(whole, batch)
        raise self._order_unknown(batch)

    def _order_unknown(self, batch: Sequence[Any]) -> WorkloadError:
        assert self._parameters is not None
        code = inspect.unwrap(type(self._task.module).forward).__code__  # type: ignore[union-attr]  # a Task has a forward
        kinds = ", ".join("text" if _is_object(value) else "tensor" for value in batch)
        return refusal(
            self._task.name,
            f"a batch is a {type(batch).__name__} of {len(batch)} ({kinds}), and forward takes "
            f"{', '.join(repr(p.name) for p in self._parameters) or 'nothing'}: which is which cannot be "
            "told by the order",
            place_of(code.co_filename, code.co_firstlineno),
            "Let the dataset's items be dicts whose keys are the names of forward's arguments.",
        )

    def _only_argument(self) -> inspect.Parameter | None:
        """The argument that takes a whole batch: the only one that has to be given, or that there is."""
        assert self._parameters is not None
        positional = [p for p in self._parameters if p.kind in _POSITIONAL]
        several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        required = [p for p in self._parameters if p.default is p.empty and p.kind not in several]
        candidates = required or positional
        return candidates[0] if len(candidates) == 1 and candidates[0].kind in _POSITIONAL else None

    def _whole(self, parameter: inspect.Parameter, batch: Any) -> Arguments:
        form = self._form(parameter.name, batch)
        return Arguments((form,), (), tuple(self._left_out))

    def _takes_text(self, name: str, value: Any) -> WorkloadError:
        inner = value[0] if isinstance(value, list | tuple) and value else value
        if inner == as_text(None):
            return WorkloadError(
                f"task {self._task.name!r}: forward takes {name!r}, which is None in the dataset's items",
                hint="Leave it out of the items: forward then takes its default.",
            )
        return WorkloadError(
            f"task {self._task.name!r}: forward takes {name!r}, of which items have a "
            f"{type(inner).__name__} and no tensor",
            hint=_TOKENS,
        )

    def _form(self, name: str, value: Any) -> Form:
        if value is None:
            return Form(None)
        if _is_object(value):
            self._left_out.append(name)
            return Form(LeftOut, name)
        inner = _parts(value)
        if inner is None or not any(isinstance(leaf, Tensor) for leaf in _leaves(value)):
            return Form(None, self._put(name, value))
        parts = tuple((key, self._form(f"{name}_{key}", part)) for key, part in inner)
        return Form(type(value), None, parts)

    def _put(self, name: str, value: Any) -> str:
        if name in self.fields or (self._parameters is not None and not name.isidentifier()):
            name = re.sub(r"\W", "_", name)
            while name in self.fields:
                name += "_"
        self.fields[name] = value
        return name


def _is_for_texts(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in (str, "str") or isinstance(parameter.default, str)


def _is_for_tensors(parameter: inspect.Parameter) -> bool:
    """Whether a tensor may be meant for it: not for a flag or a number."""
    return parameter.default is parameter.empty or parameter.default is None


def _attributes(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what a container has, by key, position or attribute; None of anything else, such as a dataclass
    that holds no tensors.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        attributes = _attributes(value)
        has_tensors = any(isinstance(leaf, Tensor) for leaf in _leaves(list(attributes.values())))
        return list(attributes.items()) if has_tensors else None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    return list(enumerate(value)) if isinstance(value, list | tuple) else None


def _leaves(value: Any) -> Iterator[Any]:
    parts = _parts(value)
    if parts is None:
        yield value
    for _, part in parts or ():
        yield from _leaves(part)


def _is_object(value: Any) -> bool:
    """Whether it is a text or another object that is neither a number nor a tensor, or made of such alone."""
    leaves = [leaf for leaf in _leaves(value) if leaf is not None]
    return bool(leaves) and not any(isinstance(leaf, _NUMBERS) for leaf in leaves)


def as_text(value: Any) -> Any:
    """Return an entry of an item as torch's default_collate takes it: an object that it does not know as a
    text, in dicts, lists and tuples too.
    """
    if isinstance(value, dict):
        return {key: as_text(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(as_text, value))
    is_collatable = isinstance(value, (*_NUMBERS, str, bytes, Mapping, list, tuple))
    return value if is_collatable else type(value).__name__
