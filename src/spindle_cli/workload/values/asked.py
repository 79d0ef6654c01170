"""A declared number as operators see it while they are examined: one that refuses to decide by it.

An operator is run as it is, so it may compute anything with the number; but what was found out about it holds
for the way that it took, and with another number it might take another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.refuse import place_of_caller

DECIDE_IN_SCHEDULE = (
    "Decide in the function of the step that `step_values` has for it (min, max, if), and compute with what "
    "it gives; a branch that is switched off is one that is multiplied by 0.0."
)


class AskedNumber(float):
    """The number of a step value; code other than torch's that compares it is refused."""

    name: str

    def __new__(cls, value: float, name: str) -> AskedNumber:
        """`name`: of the step value."""
        made = super().__new__(cls, value)
        made.name = name
        return made

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """A plain number, for other processes."""
        return float, (float.__float__(self),)

    __hash__ = float.__hash__


def decides(name: str, place: str | None) -> WorkloadError:
    """The refusal of code that decides by a step value."""
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
    own: Callable[..., Any] = getattr(float, name)

    def ask(self: AskedNumber, *others: Any) -> Any:
        if not _is_other(str(sys._getframe(1).f_globals.get("__name__"))):
            raise decides(self.name, place_of_caller())
        return own(self, *others)

    return ask


def _computing(name: str) -> Callable[..., Any]:
    own: Callable[..., Any] = getattr(float, name)

    def compute(self: AskedNumber, *others: Any) -> Any:
        found = own(self, *others)
        return AskedNumber(found, self.name) if isinstance(found, float) else found

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
    setattr(AskedNumber, f"__{_name}__", _deciding(f"__{_name}__"))
for _name in ("add", "sub", "mul", "truediv", "pow", "mod"):
    setattr(AskedNumber, f"__{_name}__", _computing(f"__{_name}__"))
    setattr(AskedNumber, f"__r{_name}__", _computing(f"__r{_name}__"))
for _name in ("neg", "abs", "pos"):
    setattr(AskedNumber, f"__{_name}__", _computing(f"__{_name}__"))
