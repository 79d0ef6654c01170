"""Numbers and the like that forward keeps on a module, and that nobody reads: `self.step += 1`.

A trace would do that once and for all, which is no matter if nothing is computed with it. What an earlier
forward has left is not known, so something unknown stands for it while forward is traced again: it may be
counted on, and whoever else looks at it is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from torch import nn

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.refuse import place_of_caller, refusal

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
