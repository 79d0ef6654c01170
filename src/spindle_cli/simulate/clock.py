"""Time: what is due next."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Event = Callable[[], None]
StillDue = Callable[[], bool]


class Clock:
    """Events by time; those of one time run in the order in which they were set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Event, StillDue | None]] = []
        self._count = 0

    def at(self, time_s: float, event: Event, still_due: StillDue | None = None) -> None:
        """Let `event` happen at `time_s`, if it is still due then."""
        heapq.heappush(self._due, (time_s, self._count, event, still_due))
        self._count += 1

    def next_moment(self) -> list[Event]:
        """Go on to the next time at which anything is due; all that is due then. Empty at the end.

        What is no longer due takes no time: behind all that happens it would make that last longer.
        """
        events: list[Event] = []
        while self._due and (not events or self._due[0][0] == self.now_s):
            time_s, _, event, still_due = heapq.heappop(self._due)
            if still_due is None or still_due():
                self.now_s = time_s
                events.append(event)
        return events
