"""A schedule before placement: slices with numbers of devices and times, no devices yet.

As any free devices will do in it, a schedule is valid when no more than N devices are busy at any moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spindle_cli.profile.types import CurvePoint


@dataclass(frozen=True)
class Piece:
    """Ops [first, last) of a node on one allocation, from start to end."""

    node: int
    first: int
    last: int
    point: CurvePoint
    start_s: float
    end_s: float

    @property
    def num_ops(self) -> int:
        """Number of ops."""
        return self.last - self.first


def end_of(pieces: Iterable[Piece]) -> float:
    """Seconds from the schedule's start to its end."""
    return max(piece.end_s for piece in pieces)
