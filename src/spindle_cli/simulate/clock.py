"""Time: what is due next."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Event = Callable[[], None]


class Clock:
    """Events by time; those of one time run in the order in which they were set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Event]] = []
        self._count = 0

    def at(self, time_s: float, event: Event) -> None:
        """Let `event` happen at `time_s`."""
        heapq.heappush(self._due, (time_s, self._count, event))
        self._count += 1

    def next_moment(self) -> list[Event]:
        """Go on to the next time at which anything is due; all that is due then. Empty at the end."""
        if not self._due:
            return []
        self.now_s = self._due[0][0]
        events: list[Event] = []
        while self._due and self._due[0][0] == self.now_s:
            events.append(heapq.heappop(self._due)[2])
        return events
