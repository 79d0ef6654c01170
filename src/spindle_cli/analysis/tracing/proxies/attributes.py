"""Attributes that a forward sets on a module: those for one forward alone, and numbers that are kept and
nobody reads, as in `self.step += 1`.

A trace would do that once and for all, which is no matter if nothing is computed with it. What an earlier
forward has left is not known, so something unknown stands for it while forward is traced again: it may be
counted on, and whoever else looks at it is refused.

`self.mean = x.mean(1)` in one call and `x + self.mean` in the next, as reversible instance normalisation has
it: a trace follows the value like any other. That is right only where no forward sees what an earlier one
has left. The attribute is not there before the first, so whoever looks for it too early asks in vain, and is
seen here; an operator would look at the real module, which has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.attributes import Changes
from spindle_cli.workload.building.contents import Leftover
from spindle_cli.workload.graph import CONSTANT
from spindle_cli.workload.refuse import Frame, frames_of_caller, place_of_caller, refusal

# Not None, which is asked for by `is`: nobody would see that.
PLAIN = (bool, int, float, complex, str, bytes)
DECLARED = (
    "Leave it out where nothing has to be counted. A number that follows from the step belongs to the task, "
    "and forward reads it alone: Task(..., step_values={'beta': lambda step: min(1.0, (step + 1) / 100)}). "
    "Or put this part into an nn.Module of its own and list its class in the workload's `operators`: it is "
    "then run as it is, on one device."
)


OF_OPERATOR = (
    "Let the operator return it beside its output. A number that is the same in every step is written as one "
    "(len(self.layers)); one that follows from the step is declared: Task(..., step_values={'beta': lambda "
    "step: min(1.0, (step + 1) / 100)}). Or put the operators and this part into one nn.Module and list its "
    "class in the workload's `operators`: it is then run as it is."
)


def of_operator(name: str) -> str:
    """What is said of a forward that reads what operators leave."""
    return (
        f"forward reads {name} between operators, which an operator sets, or a hook of one: other devices "
        "may run that, and a trace does not"
    )


class SetsPlainError(BaseException):
    """Forward sets an attribute of a module to another plain value; it is to be traced as an unknown one. No
    `except Exception` of forward's is to catch this.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.key = module, name


class ReadsUnknownError(WorkloadError):
    """Forward computes with what an earlier one has left somewhere, or decides by it; `place`: where.
    `is_of_operator`: an operator has left it.
    """

    place: str | None = None
    is_of_operator = False


class Unknown:
    """What an earlier forward has left in an attribute of a module, or of something else that holds it; or
    what an operator has, or a hook of one.
    """

    def __init__(self, task: str, holder: object, name: str, *, is_of_operator: bool = False) -> None:
        self._task, self._holder, self._name = task, holder, name
        self._is_of_operator = is_of_operator

    def refuse(self) -> NoReturn:
        """Refuse a forward that needs to know the value.

        Raises:
            ReadsUnknownError: always.
        """
        what = (
            f"forward sets self.{self._name} of {type(self._holder).__name__} between operators and "
            "reads what an earlier one has left there"
        )
        hint = DECLARED
        if self._is_of_operator:
            what, hint = of_operator(self._name), OF_OPERATOR
        place = place_of_caller()
        made = refusal(self._task, what, place, hint)
        error = ReadsUnknownError(*made.args, hint=made.hint)
        error.place, error.is_of_operator = place, self._is_of_operator
        raise error

    def _counted(self, operand: object) -> Any:
        return self if isinstance(operand, (*PLAIN, Unknown)) else NotImplemented

    def _read(self, *_: object) -> NoReturn:
        self.refuse()

    def _turned(self) -> Unknown:
        return self

    def __getattr__(self, name: str) -> Any:
        """Methods of numbers and texts look at them; what torch asks of everything is not there."""
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = _counted
    __rmod__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _counted
    __neg__ = __pos__ = __abs__ = _turned
    __round__ = __divmod__ = __rdivmod__ = _read
    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __hash__ = _read
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _read
    __str__ = __format__ = __contains__ = __getitem__ = __call__ = _read


@contextlib.contextmanager
def unknown_inside(task: str, attributes: Collection[tuple[nn.Module, str]]) -> Iterator[None]:
    """Let attributes be unknown inside; they have their values of before afterwards."""
    before = [(module, name, module.__dict__[name]) for module, name in attributes]
    for module, name in attributes:
        module.__dict__[name] = Unknown(task, module, name)
    try:
        yield
    finally:
        for module, name, value in before:
            module.__dict__[name] = value


@dataclass(frozen=True)
class SeenAttributes:
    """The attributes that the forwards of a workload asked for in vain, and that they made, each by its
    module and name. Tasks that share a module see what another one has left there. `left`: those that
    operators leave on themselves, by the module's class. `counted`: those that forwards set to other plain
    values, which no forward is to read. `leftovers`: what operators leave anywhere; `noted`: what hooks of
    forward's own note of them; `written`: what operators write into, of each memory one tensor.
    `left_between`: by task, what its forward leaves between operators: places (`kept_in`), with
    names.
    """

    missed: set[tuple[nn.Module, str]] = field(default_factory=set)
    made: set[tuple[nn.Module, str]] = field(default_factory=set)
    left: dict[type[nn.Module], set[str]] = field(default_factory=dict)
    counted: list[tuple[nn.Module, str]] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)
    left_between: dict[str, dict[object, str]] = field(default_factory=dict)

    def note(self, operator: nn.Module, changes: Changes) -> None:
        """An operator's forward has changed its own attributes, or those of its parts."""
        for dotted in (*changes.tensors, *changes.counted):
            part, _, name = dotted.rpartition(".")
            self.left.setdefault(type(operator.get_submodule(part)), set()).add(name)


class KeptValue(NamedTuple):
    """What forward has set an attribute to, what that was before, and the frames that have set it."""

    module: nn.Module
    name: str
    value: object
    old: object
    frames: tuple[Frame, ...]


class Scratch:
    """Which attributes of a task's modules are of one forward alone."""

    def __init__(
        self,
        task: str,
        root: nn.Module,
        operators: tuple[type[nn.Module], ...],
        seen: SeenAttributes,
        others: Collection[nn.Module] = (),
    ) -> None:
        """`operators`: the classes of modules that are not traced into; `seen`: by the whole workload;
        `others`: the modules of other tasks.
        """
        self._shared = {module for other_root in others for module in other_root.modules()}
        self._task = task
        self._seen = seen
        self._own: set[tuple[nn.Module, str]] = set()
        opaque = [module for module in root.modules() if isinstance(module, operators)]
        self._inside = {inner for module in opaque for inner in module.modules()}
        self._called: set[nn.Module] = set()  # operators that forward has called, and their parts
        self._hidden: dict[tuple[nn.Module, str], Any] = {}
        self.kept: list[Leftover] = []  # what attributes were set to that were there before
        self.kept_values: list[KeptValue] = []  # the same, but for what torch.fx keeps itself

    def takes(self, module: nn.Module, name: str) -> bool:
        """Whether a traced value, or a list or the like, may be assigned: the module has had no such
        attribute before this forward, nobody has asked for it in vain, and no operator sees the module.
        """
        key = module, name
        if key in self._own:
            return True
        holders = (module.__dict__, module._parameters, module._buffers, module._modules)
        is_there = hasattr(type(module), name) or any(name in held for held in holders)
        if is_there or key in self._seen.missed or module in self._inside:
            return False
        self._own.add(key)
        self._seen.made.add(key)
        return True

    def keep(self, module: nn.Module, name: str, value: object) -> None:
        """Note that forward keeps a tensor in an attribute."""
        self.kept.append(Leftover.of_attribute(module, name, value))
        if not name.startswith(CONSTANT):  # of torch.fx's own
            old = module.__dict__.get(name)
            self.kept_values.append(KeptValue(module, name, value, old, frames_of_caller()))

    def keeps(self, module: nn.Module, name: str, value: object) -> bool:
        """Whether a traced value, or a list or the like, may be in the place of another, for the next forward
        to find: no operator sees the module, nor another task.
        """
        if name not in module.__dict__ or module in self._inside or module in self._shared:
            return False
        self.keep(module, name, value)
        return True

    def may_be_unknown(self, module: nn.Module, name: str, old: Any, value: Any) -> bool:
        """Whether an attribute may be set to a plain value that other forwards are not to read: no operator
        sees the module, nor another task.
        """
        kinds = (*PLAIN, Unknown)
        is_plain = isinstance(old, kinds) and isinstance(value, kinds) and name in module.__dict__
        return is_plain and module not in self._inside and module not in self._shared

    def is_unknown(self, module: nn.Module, name: str) -> bool:
        """Whether it is known that what an earlier forward has left in an attribute is not."""
        return (module, name) in self._seen.counted

    def hide(self, operator: nn.Module) -> None:
        """Let nobody but operators read what this one has left on itself: a trace would have its value of
        before, and another device does not have it at all.
        """
        for part in operator.modules():
            self._called.add(part)
            for name in self._seen.left.get(type(part), ()):
                if name in part.__dict__:
                    self._hidden[part, name] = part.__dict__.pop(name)

    @contextlib.contextmanager
    def watching(self, is_looking: Callable[[], bool]) -> Iterator[None]:
        """Notice, inside, who asks a module for an attribute that it lacks. `is_looking`: whether operators
        are being run to find out what is known.

        Raises:
            WorkloadError: another forward has made it, and would have left it there; or an operator has.
        """
        module_class: Any = nn.Module
        original = module_class.__getattr__

        def ask(module: nn.Module, name: str) -> Any:
            try:
                return original(module, name)
            except AttributeError:
                if is_looking() and (module, name) in self._hidden:
                    return self._hidden[module, name]
                self._miss(module, name)
                raise

        module_class.__getattr__ = ask
        try:
            yield
        finally:
            module_class.__getattr__ = original

    def _miss(self, module: nn.Module, name: str) -> None:
        if module in self._called and name in self._seen.left.get(type(module), ()):
            raise refusal(
                self._task,
                f"forward asks for {name} of {type(module).__name__}, which an operator leaves there",
                place_of_caller(),
                "Let the operator return it beside its output; where no operator has to be, leave the class "
                "out of `operators`.",
            )
        self._seen.missed.add((module, name))
        if (module, name) in self._seen.made:
            raise refusal(
                self._task,
                f"forward asks for self.{name} of {type(module).__name__}, which another forward sets",
                place_of_caller(),
                "Hand the value on as an argument, or set it in each forward before it is asked for.",
            )
