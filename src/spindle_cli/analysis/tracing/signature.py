"""Whether the fields of a task's batch are the arguments of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from spindle_cli.workload.arguments import Arguments
from spindle_cli.workload.refuse import place_of, refusal
from spindle_cli.workload.step_values import arguments_of_step
from spindle_cli.workload.types import Task


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
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        accepted = None
    else:
        accepted = {parameter.name for parameter in parameters}
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    unknown = [] if accepted is None else [name for name in fields if name not in accepted]
    missing = [p.name for p in named if p.default is p.empty and p.name not in fields]
    if not unknown and not missing:
        return
    problems = []
    if missing:
        problems.append(f"the dataset's items lack {', '.join(map(repr, missing))}")
    if unknown:
        problems.append(f"forward does not take {', '.join(map(repr, unknown))}")
    raise refusal(
        task.name,
        f"{' and '.join(problems)}; items have {', '.join(map(repr, fields)) or 'nothing'}, "
        f"forward takes {', '.join(repr(p.name) for p in named) or 'nothing'}",
        place,
        "A dataset item is a dict whose keys are the names of forward's arguments.",
    )


def place_of_function(function: Callable[..., Any]) -> str | None:
    """'file:line' where a function is defined."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else place_of(code.co_filename, code.co_firstlineno)
