"""How long a run that goes on will still take."""

from __future__ import annotations

import statistics
from collections import deque

# Steps over which the pace is taken: enough to be calm, few enough to follow a change.
RECENT_STEPS = 20


class Pace:
    """The usual time of a run's latest steps, and what comes between them."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._first_s: float | None = None
        self._inside_s = self._outside_s = 0.0
        self._steps = 0

    def add(self, iteration_s: float, seen_s: float | None = None) -> None:
        """One step more; `seen_s`: when it was seen to have ended, where somebody looks all the time."""
        self._recent.append(iteration_s)
        if seen_s is None:
            return
        if self._first_s is None:
            self._first_s = seen_s
            return
        self._steps += 1
        self._inside_s += iteration_s
        self._outside_s = seen_s - self._first_s - self._inside_s

    @property
    def between_s(self) -> float:
        """The seconds between one step and the next that are part of neither, in the mean since the first
        step seen.
        """
        return max(self._outside_s, 0.0) / self._steps if self._steps else 0.0

    @property
    def step_s(self) -> float | None:
        """The median of the latest steps; None before the first."""
        return statistics.median(self._recent) if self._recent else None

    def left_s(self, steps_left: int, between_s: float = 0.0) -> float | None:
        """Seconds until the last step ends; None before the first one has.

        `between_s`: of each step in the mean, what is no part of it: evaluations, checkpoints.
        """
        step_s = self.step_s
        return None if step_s is None else (step_s + between_s) * max(steps_left, 0)
