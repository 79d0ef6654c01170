"""What a check finds."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from spindle_cli.files.artifact import Model
from spindle_cli.plan.types import Plan, Slice, format_devices
from spindle_cli.units import format_seconds

# Times in files are decimal roundings: what is later by less than this share of what a slice takes counts as
# equal.
RELATIVE_SLACK = 1e-6
# Characters of each part of a message; names in a file may have any number.
_MOST_SHOWN = 400
# What floats near a time can be off by.
_ROUNDING = 4 * sys.float_info.epsilon


class Violation(Model):
    """One rule that a plan breaks, and where.

    Attributes:
        rule: short name of the rule, for scripts: 'coverage', 'order', 'device-busy', ...
        where: 'wave 3, image_text/vision[0:6]', or the key of the plan file that is wrong.
        devices: those concerned; empty where the rule is not about devices.
        value: what the plan says.
        expected: what the rule asks for.
    """

    rule: str
    where: str
    devices: tuple[int, ...] = ()
    value: str
    expected: str

    def __str__(self) -> str:
        place = self.where
        if self.devices:
            shown = [str(item) for item in format_devices(self.devices)]
            listed = ", ".join(shown[:6]) + (", ..." if len(shown) > 6 else "")
            place += f", device{'s' if len(self.devices) > 1 else ''} {listed}"
        return f"{_short(place)}: {_short(self.value)}; expected {_short(self.expected)} [{self.rule}]"


def _short(text: str) -> str:
    """The beginning and the end of what is long."""
    if len(text) <= _MOST_SHOWN:
        return text
    half = _MOST_SHOWN // 2
    return f"{text[:half]} ... {text[-half:]}"


def slack_s(*pieces: Slice) -> float:
    """Seconds by which times of these slices may differ and still count as equal: by the shortest of them, as
    one that is stretched says nothing of the others.
    """
    times = [each for piece in pieces for each in piece.times_s]
    shortest = min((end_s - start_s for start_s, end_s in times), default=0.0)
    return RELATIVE_SLACK * max(shortest, 0.0) + _ROUNDING * max((end_s for _, end_s in times), default=0.0)


def place_of(wave: int, piece: Slice) -> str:
    """A slice by its wave and its ops, for messages."""
    return f"wave {wave}, {piece.label}"


def located(plan: Plan) -> Iterable[tuple[int, Slice]]:
    """Every slice with its wave's index, in file order."""
    return ((wave.index, piece) for wave in plan.waves for piece in wave.slices)


def exact_s(seconds: float) -> str:
    """A time that can be compared with the file's digits, and read: '0.012345678 s (12.3 ms)'."""
    return f"{seconds:.9g} s ({format_seconds(seconds)})"
