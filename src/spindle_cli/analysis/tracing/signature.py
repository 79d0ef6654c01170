"""Whether the fields of a task's batch are the arguments of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from spindle_cli.workload.arguments import Arguments
from spindle_cli.workload.refuse import place_of, refusal
from spindle_cli.workload.step_values import arguments_of_step
from spindle_cli.workload.types import Task

_ANY_NUMBER = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def check_signature(task: Task, arguments: Arguments | None) -> None:
    """Refuse fields that forward does not take, and arguments that no field gives.

    Raises:
        WorkloadError: with the place of forward.
    """
    if arguments is None or arguments.args:  # which were counted
        return
    fields = tuple(name for name, _ in arguments.kwargs)
    forward = type(task.module).forward
    place = place_of_function(forward)
    twice = next((name for name in arguments_of_step(task.module) if name in fields), None)
    if twice is not None:
        raise refusal(
            task.name,
            f"the dataset's items have {twice!r}, which is a number of the step too (step_values)",
            place,
            "Leave it out of one of the two.",
        )
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    named = [p.name for p in parameters if p.kind not in _ANY_NUMBER]
    problems = _problems(fields, parameters)
    if problems:
        raise refusal(
            task.name,
            f"{' and '.join(problems)}; items have {', '.join(map(repr, fields)) or 'nothing'}, "
            f"forward takes {', '.join(map(repr, named)) or 'nothing'}",
            place,
            "A dataset item is a dict whose keys are the names of forward's arguments.",
        )


def _problems(fields: Sequence[str], parameters: Sequence[inspect.Parameter]) -> list[str]:
    """Say which parameters of a forward no field gives, and which fields it does not take."""
    names = [p.name for p in parameters]
    needed = [p.name for p in parameters if p.kind not in _ANY_NUMBER and p.default is p.empty]
    missing = [name for name in needed if name not in fields]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if takes_all else [name for name in fields if name not in names]
    said = {"the dataset's items lack": missing, "forward does not take": unknown}
    return [f"{what} {', '.join(map(repr, listed))}" for what, listed in said.items() if listed]


def place_of_function(function: Callable[..., Any]) -> str | None:
    """'file:line' where a function is defined."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else place_of(code.co_filename, code.co_firstlineno)
