"""Collect one kind of comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from spindle_cli.verify.types import Check, Difference, What


@dataclass
class Tally:
    """Counts comparisons of one kind, and keeps the largest difference and every one beyond the tolerance."""

    what: What
    tolerance: float
    compared: int = 0
    largest: Difference | None = None
    failures: list[Difference] = field(default_factory=list)
    explained: list[Difference] = field(default_factory=list)

    def add(self, difference: Difference, tolerance: float | None = None, *, explained: bool = False) -> None:
        """Count a comparison; one that could not be made, or is beyond the tolerance, is a failure.

        `tolerance`: of this one; None: that of all. `explained`: rounding may make a difference as large.
        """
        self.compared += 1
        if _size(difference) > (self.tolerance if tolerance is None else tolerance):
            (self.explained if explained else self.failures).append(difference)
        if self.largest is None or _size(difference) > _size(self.largest):
            self.largest = difference

    def check(self) -> Check:
        """Return the result, with the largest failures first."""
        return Check(
            what=self.what,
            compared=self.compared,
            tolerance=self.tolerance,
            largest=self.largest,
            failures=tuple(sorted(self.failures, key=_size, reverse=True)),
            explained=tuple(sorted(self.explained, key=_size, reverse=True)),
        )


def _size(difference: Difference) -> float:
    return math.inf if difference.relative is None else difference.relative
