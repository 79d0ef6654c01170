"""Numbers that change from step to step and that tasks declare (`Task.step_values`).

Each is a function of the step, so that every rank and every process knows it without being told. Before a
step the number is put where forwards read it. Operators read it there. Between operators a trace has a node
that asks the `StepValue` for its number, which the task's module holds for that, by a name of ours.

While they are examined, operators see a number that refuses to decide by it: an operator is run as it is,
so it may compute anything with the number; but what was found out about it holds for the way that it
took, and with another number it might take another.

Where a forward reads a number that changes from step to step: an attribute, an entry of a dict or list, a
name of a Python module, or an argument of the task's forward that no field gives.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any

from torch import Tensor, fx, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.files.artifact import shown
from spindle_cli.workload.graph import root_of
from spindle_cli.workload.refuse import place_of_caller, place_of_error, refusal
from spindle_cli.workload.settings.updates import between
from spindle_cli.workload.types import FlowTask, StepSchedule, Workload

_WAYS = (
    "The name of an attribute, dotted from the task's module ('beta', 'decoder.temperature'), with * for "
    "several ('*.dropout.p'); the name of an argument of its forward; or 'package.module:NAME', "
    "'package.module:CONFIG.beta'."
)
# Where a task's module holds the numbers that are arguments of its forward.
_ARGUMENTS = "_spindle_arguments"


@dataclass(frozen=True, eq=False)
class Place:
    """A number that code reads as `holder.key`, or `holder[key]` of a dict or list."""

    holder: Any
    key: Any

    def get(self) -> Any:
        """Return the number that the place holds."""
        if isinstance(self.holder, MutableMapping | MutableSequence):
            return self.holder[self.key]
        return getattr(self.holder, self.key)

    def put(self, value: Any) -> None:
        """Let it be there, whatever a class of the user's does with what is set."""
        if isinstance(self.holder, MutableMapping | MutableSequence):
            self.holder[self.key] = value
        elif isinstance(self.holder, type):
            setattr(self.holder, self.key, value)
        else:
            object.__setattr__(self.holder, self.key, value)

    def is_same(self, second: Place) -> bool:
        """Whether both are one place."""
        return self.holder is second.holder and bool(self.key == second.key)


def find_places(path: str, root: nn.Module, where: str) -> tuple[Place, ...]:
    """Return the places that a path names.

    Args:
        root: of the task.
        where: begins messages.

    Raises:
        WorkloadError: there is no such place, or no number in it.
    """
    if ":" in path:
        name, _, inside = path.partition(":")
        places = [_walk(_module(name, where), inside.split("."), path, where)]
    elif "*" in path:
        places = list(_matching(path, root))
        if not places:
            raise WorkloadError(f"{where}: no module has a number by {shown(path)}", hint=_WAYS)
    elif path in _parameters(root) and not hasattr(root, path):
        places = [_argument(path, root, where)]
    else:
        places = [_walk(root, path.split("."), path, where)]
    for place in places:
        _require_number(place, path, where)
    return tuple(places)


def arguments_of_step(root: nn.Module) -> Mapping[str, Any]:
    """Return what forward of a task's module is given beside its fields: numbers of the step, by name."""
    arguments: Mapping[str, Any] = vars(root).get(_ARGUMENTS, {})
    return arguments


def _argument(name: str, root: nn.Module, where: str) -> Place:
    """Return an argument of forward, which has its default at first."""
    default = _parameters(root)[name].default
    if not is_number(default):
        raise WorkloadError(
            f"{where}: {shown(name)} is an argument of {type(root).__name__}.forward, without a number to "
            "begin with",
            hint=f"Give it one, as in `def forward(self, ..., {name}=0.0)`.",
        )
    held: dict[str, Any] = vars(root).setdefault(_ARGUMENTS, {})
    held.setdefault(name, default)
    return Place(held, name)


def _parameters(root: nn.Module) -> Mapping[str, inspect.Parameter]:
    parameters = list(inspect.signature(type(root).forward).parameters.values())[1:]
    return {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _module(name: str, where: str) -> Any:
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except Exception as error:  # code of the user's
        raise WorkloadError(
            f"{where}: there is no module {shown(name)}: {type(error).__name__}: {error}", hint=_WAYS
        ) from error


def _walk(start: Any, parts: list[str], path: str, where: str) -> Place:
    holder = start
    for part in parts[:-1]:
        try:
            holder = _inside(holder, part)
        except (AttributeError, LookupError, ValueError) as error:
            raise _missing(holder, part, path, where) from error
    key: Any = parts[-1]
    if isinstance(holder, MutableSequence) and not isinstance(holder, nn.Module) and key.isdigit():
        key = int(key)
    place = Place(holder, key)
    try:
        place.get()
    except (AttributeError, LookupError, TypeError) as error:
        raise _missing(holder, key, path, where) from error
    return place


def _inside(holder: Any, part: str) -> Any:
    if isinstance(holder, Mapping):
        return holder[part]
    if isinstance(holder, list | tuple):
        return holder[int(part)]
    return getattr(holder, part)


def _missing(holder: Any, part: Any, path: str, where: str) -> WorkloadError:
    what = getattr(holder, "__name__", type(holder).__name__)
    return WorkloadError(f"{where}: {shown(path)}: {what} has no {shown(part)}", hint=_WAYS)


def _matching(pattern: str, root: nn.Module) -> Iterator[Place]:
    for name, module in root.named_modules():
        for key, value in module.__dict__.items():
            if is_number(value) and fnmatchcase(f"{name}.{key}" if name else key, pattern):
                yield Place(module, key)


def is_number(value: Any) -> bool:
    """Whether something is a number of Python's."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_number(place: Place, path: str, where: str) -> None:
    holder, value = place.holder, place.get()
    if isinstance(getattr(type(holder), str(place.key), None), property):
        raise WorkloadError(
            f"{where}: {shown(path)} is a property of {type(holder).__name__}",
            hint="Name the attribute that it returns.",
        )
    if isinstance(value, Tensor):
        raise WorkloadError(
            f"{where}: {shown(path)} is a tensor, expected a number",
            hint="Let the module hold it as a number (self.beta = 0.0), no buffer or parameter.",
        )
    if not is_number(value):
        raise WorkloadError(
            f"{where}: {shown(path)} is {value!r:.80}, expected a number to begin with, as 0.0"
        )


# How the names begin by which roots of traces hold step values.
HELD_AS = "spindle_step_value_"
_READS = "_spindle_reads_step_values"  # a mark of modules that hold a place


@dataclass(eq=False)
class StepValue:
    """A declared number. `name`: 'task/path'. `places`: where it is read. `now`: of the step that runs."""

    name: str
    schedule: StepSchedule
    places: tuple[Place, ...]
    now: float = 0.0

    def __repr__(self) -> str:
        return f"step value {self.name}"

    @property
    def is_of_all_builds(self) -> bool:
        """Whether a Python module holds it."""
        return ":" in self.name.partition("/")[2]

    @property
    def is_set_by_callbacks(self) -> bool:
        """Whether it stays as it is until a callback sets another."""
        return is_number(self.schedule)

    def at(self, step: int) -> float:
        """Return the number of a step counted from 0; of what callbacks set, the first one.

        Raises:
            WorkloadError: the user's function fails, or gives something else than a finite number.
        """
        if callable(self.schedule):
            return self._of_function(self.schedule, step)
        if isinstance(self.schedule, Sequence):
            return between(self.schedule, step)
        return float(self.schedule)

    def _of_function(self, function: Callable[[int], float], step: int) -> float:
        try:
            value: Any = function(step)
        except Exception as error:  # code of the user's
            place = place_of_error(error)
            raise WorkloadError(
                f"step_values: {self.name} failed for step {step}: {type(error).__name__}: {error}"
                f"{f', at {place}' if place else ''}"
            ) from error
        number = getattr(value, "item", lambda: value)()  # of numpy or torch
        if not is_number(number) or not isfinite(number):
            raise WorkloadError(
                f"step_values: {self.name} gave {value!r:.80} for step {step}; expected a finite number"
            )
        return float(number)

    def put(self, number: float) -> None:
        """Let forwards read it from here on."""
        self.now = number
        for place in self.places:
            place.put(number)


def number_of(value: StepValue) -> float:
    """Return what a node of a trace asks."""
    return value.now


@dataclass(frozen=True)
class StepValues:
    """All step values of a workload, by name."""

    by_name: Mapping[str, StepValue] = field(default_factory=dict)

    @classmethod
    def of(cls, workload: Workload) -> StepValues:
        """Return what a workload's tasks declare; equal objects each time, as its modules hold them.

        Raises:
            WorkloadError: one names no number, or has no schedule; or two have different ones for one place.
        """
        by_name: dict[str, StepValue] = {}
        for task in workload.all_tasks:
            root = root_of(task) if task.step_values else None
            for path, schedule in task.step_values.items():
                assert root is not None, "it has declared some"
                name = f"{task.name}/{path}"
                where = f"task {task.name!r}: step_values"
                made = StepValue(name, _checked(schedule, path, where), find_places(path, root, where))
                same_place = next(
                    (declared for declared in by_name.values() if _overlap(declared, made)), None
                )
                if same_place is None:
                    by_name[name] = made
                elif same_place.schedule != schedule or len(same_place.places) != len(made.places):
                    raise WorkloadError(
                        f"{where}: {shown(path)} is declared twice, as {same_place.name} too, with different "
                        "schedules",
                        hint="Tasks that share a module have one number there: give both the same function.",
                    )
        return cls(
            {name: _held(value, number, workload) for number, (name, value) in enumerate(by_name.items())}
        )

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def at(self, step: int) -> dict[str, float]:
        """Return the numbers of a step counted from 0; of those that callbacks set, what they are now."""
        return {
            name: value.now if value.is_set_by_callbacks else value.at(step)
            for name, value in self.by_name.items()
        }

    def begin(self, step: int) -> dict[str, float]:
        """Let forwards read the numbers of a step counted from 0, and say them; raises what `at` raises."""
        numbers = self.at(step)
        for name, number in numbers.items():
            self.by_name[name].put(number)
        return numbers

    def reset(self) -> None:
        """Let the forwards of a new build read the numbers of the first step. What Python modules hold is
        that of all builds, one of which may be in training: it becomes a float, if it is none.
        """
        for value in self.by_name.values():
            value.now = value.at(0)
            for place in value.places:
                if not (value.is_of_all_builds and type(place.get()) is float):
                    place.put(value.now)

    @contextlib.contextmanager
    def decisions_refused(self) -> Iterator[None]:
        """Refuse, inside, code that decides by one of the numbers."""
        for value in self.by_name.values():
            for place in value.places:
                place.put(WatchedNumber(value.now, value.name))
        try:
            yield
        finally:
            for value in self.by_name.values():
                value.put(value.now)

    def traced(self, tracer: fx.Tracer, root: nn.Module) -> TracedValues:
        """Return what stands in the places while a root is traced; operators' own, too, as others may read
        them.
        """
        return TracedValues(
            tracer,
            [
                (f"{HELD_AS}{number}", value.places)
                for number, value in enumerate(self.by_name.values())
                if hasattr(root, f"{HELD_AS}{number}")
            ],
        )


class TracedValues:
    """Lets forward read traced numbers while it is traced."""

    def __init__(self, tracer: fx.Tracer, values_and_places: Sequence[tuple[str, Sequence[Place]]]) -> None:
        self._tracer = tracer
        self._values_and_places = values_and_places
        self._now: list[tuple[Place, Any, fx.Proxy]] = []

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Let forward read the values inside."""
        for name, places in self._values_and_places:
            held = self._tracer.create_proxy("get_attr", name, (), {})
            proxy = self._tracer.create_proxy("call_function", number_of, (held,), {})
            self._now += [(place, place.get(), proxy) for place in places]
        try:
            for place, _, proxy in self._now:
                place.put(proxy)
            yield
        finally:
            for place, number, _ in self._now:
                place.put(number)
            self._now.clear()

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Inside that, modules that are run to find out what is known read numbers."""
        for place, number, _ in self._now:
            place.put(number)
        try:
            yield
        finally:
            for place, _, proxy in self._now:
                place.put(proxy)


def refuse_decision(task: str, node: fx.Node, place: str | None) -> None:
    """Refuse that forward decides by a node, or makes a plain number of it, where a step value is in it.

    Raises:
        WorkloadError: it is.
    """
    if depends_on_step(node):
        raise refusal(
            task,
            "forward decides by a value that changes between steps (step_values), or makes a number of it "
            "that a trace would keep",
            place,
            DECIDE_IN_SCHEDULE,
        )


# What tells of a tensor something else than its values.
_OF_SHAPES = frozenset({"size", "dim", "numel", "nelement", "stride", "shape", "dtype", "device", "ndim"})


def reads_step_values_in(graph: fx.Graph) -> bool:
    """Whether a trace has any."""
    return any(node.target is number_of for node in graph.nodes)


def depends_on_step(node: fx.Node) -> bool:
    """Whether a step value is in a node's number or tensor."""
    pending, seen = [node], {node}
    while pending:
        pending_node = pending.pop()
        if pending_node.target is number_of:
            return True
        if asks_no_values(pending_node):
            continue
        fresh = [source for source in pending_node.all_input_nodes if source not in seen]
        seen.update(fresh)
        pending += fresh
    return False


def asks_no_values(node: fx.Node) -> bool:
    """Whether a node asks a tensor for its shape, type or device."""
    return node.target in _OF_SHAPES or (node.target is getattr and node.args[1] in _OF_SHAPES)


def _overlap(first: StepValue, second: StepValue) -> bool:
    return any(place.is_same(second_place) for place in first.places for second_place in second.places)


def _checked(schedule: Any, path: str, where: str) -> StepSchedule:
    is_points = isinstance(schedule, list | tuple) and schedule and all(map(_is_point, schedule))
    if is_points and [step for step, _ in schedule] == sorted({step for step, _ in schedule}):
        return tuple((step, float(number)) for step, number in schedule)
    if callable(schedule) or (is_number(schedule) and isfinite(schedule)):
        return schedule  # type: ignore[no-any-return]  # the user's function
    raise WorkloadError(
        f"{where}: {shown(path)} has {schedule!r:.80}, expected a function of the step, "
        "[[step, number], ...] by ascending step, or a number that callbacks set",
        hint="Such as step_values={'beta': lambda step: min(1.0, step / 1000)}; steps count from 0.",
    )


def _is_point(value: Any) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return (
        is_pair and isinstance(value[0], int) and value[0] >= 0 and is_number(value[1]) and isfinite(value[1])
    )


def _held(made: StepValue, number: int, workload: Workload) -> StepValue:
    """Return the step value that the roots of all traces hold: that of before, if it is the same."""
    roots = [task.module for task in workload.all_tasks if not isinstance(task, FlowTask)]
    name = f"{HELD_AS}{number}"
    for root in roots:
        before = root.__dict__.get(name)
        if isinstance(before, StepValue) and before.name == made.name and _same_places(before, made):
            before.schedule = made.schedule
            made = before
            break
    for root in roots:
        root.__dict__[name] = made
    for place in made.places:
        if isinstance(place.holder, nn.Module):
            place.holder.__dict__[_READS] = True
    return made


def reads_step_values(layer: nn.Module) -> bool:
    """Whether a module or one of its parts holds a number that changes between steps."""
    return any(_READS in part.__dict__ for part in layer.modules())


def _same_places(first: StepValue, second: StepValue) -> bool:
    return len(first.places) == len(second.places) and all(
        place.is_same(second_place) for place, second_place in zip(first.places, second.places, strict=True)
    )


DECIDE_IN_SCHEDULE = (
    "Decide in the function of the step that `step_values` has for it (min, max, if), and compute with what "
    "it gives; a branch that is switched off is one that is multiplied by 0.0."
)


class WatchedNumber(float):
    """The number of a step value; code other than torch's that compares it is refused."""

    name: str

    def __new__(cls, value: float, name: str) -> WatchedNumber:
        """`name`: of the step value."""
        made = super().__new__(cls, value)
        made.name = name
        return made

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """A plain number, for other processes."""
        return float, (float.__float__(self),)

    __hash__ = float.__hash__


def decides(name: str, place: str | None) -> WorkloadError:
    """Return the refusal of code that decides by a step value."""
    where = f"{place}: " if place else ""
    return WorkloadError(
        f"{where}forward decides by {name}, a value that changes between steps, and is only known for the "
        "way that it takes now",
        hint=DECIDE_IN_SCHEDULE,
    )


def _is_other(module: str) -> bool:
    """Whether code of a module may ask: torch checks ranges, and we compare what is the same."""
    return module.partition(".")[0] in ("torch", "spindle_cli")


def _deciding(name: str) -> Callable[..., Any]:
    float_method: Callable[..., Any] = getattr(float, name)

    def ask(self: WatchedNumber, *others: Any) -> Any:
        if not _is_other(str(sys._getframe(1).f_globals.get("__name__"))):
            raise decides(self.name, place_of_caller())
        return float_method(self, *others)

    return ask


def _computing(name: str) -> Callable[..., Any]:
    float_method: Callable[..., Any] = getattr(float, name)

    def compute(self: WatchedNumber, *others: Any) -> Any:
        result = float_method(self, *others)
        return WatchedNumber(result, self.name) if isinstance(result, float) else result

    return compute


for _name in (
    "bool",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "int",
    "round",
    "floor",
    "ceil",
    "trunc",
    "floordiv",
):
    setattr(WatchedNumber, f"__{_name}__", _deciding(f"__{_name}__"))
for _name in ("add", "sub", "mul", "truediv", "pow", "mod"):
    setattr(WatchedNumber, f"__{_name}__", _computing(f"__{_name}__"))
    setattr(WatchedNumber, f"__r{_name}__", _computing(f"__r{_name}__"))
for _name in ("neg", "abs", "pos"):
    setattr(WatchedNumber, f"__{_name}__", _computing(f"__{_name}__"))
