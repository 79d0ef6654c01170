"""A fault in a program, shown where it is: the devices' actions around it as a grid, the faulty places
marked.
"""

from __future__ import annotations

from collections.abc import Sequence

from spindle_cli.errors import RunFailedError
from spindle_cli.program.types import Action, Kind, Program

Place = tuple[int, int]  # (device, step of its program)

_MAX_DEVICES = 8
_STEPS_AROUND = 4


class ProgramError(RunFailedError):
    """A program that would hang, or compute something else than its plan says."""


def fault(program: Program, message: str, *places: Place) -> ProgramError:
    """The error for a fault at these places."""
    return ProgramError(
        f"the program of this plan is wrong: {message}\n{format_grid(program, places)}",
        hint="This is a fault of spindle, not of the workload; please report it with the plan.",
    )


def format_grid(program: Program, places: Sequence[Place]) -> str:
    """A line per device that has a marked place (at most 8), the steps around it as columns, the place as
    >>...<<.

    A transfer is shown as 'SEND#12>5' (to device 5) or 'RECV#12<2' (from device 2).
    """
    lines: list[str] = []
    for device, marked in places[:_MAX_DEVICES]:
        actions = program.actions[device]
        first, last = max(0, marked - _STEPS_AROUND), min(len(actions), marked + _STEPS_AROUND + 1)
        cells = [_cell(action) for action in actions[first:last]]
        if first <= marked < last:
            cells[marked - first] = f">>{cells[marked - first]}<<"
        before, after = ("... " if first else ""), (" ..." if last < len(actions) else "")
        lines.append(f"  device {device}, from step {first}: {before}{'  '.join(cells)}{after}")
    if len(places) > _MAX_DEVICES:
        lines.append(f"  and {len(places) - _MAX_DEVICES} more devices")
    return "\n".join(lines)


def _cell(action: Action) -> str:
    if action.transfer is None:
        number = action.slice_index if action.group is None else action.group
        return str(action.kind) if number is None else f"{action.kind} {number}"
    transfer = action.transfer
    if action.kind in (Kind.SEND, Kind.SEND_GRAD):
        return f"{action.kind}#{transfer.key}>{transfer.destination}"
    return f"{action.kind}#{transfer.key}<{transfer.source}"
