"""What must hold for the events of any trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

from spindle_cli.files.runs.chrome_trace import Arrow, Bar, TraceEvent


def require_drawable(events: Iterable[TraceEvent], *, tolerance_s: float) -> None:
    """Bars of a lane do not overlap, and arrows begin and end on bars."""
    drawn = list(events)
    lanes: dict[tuple[int, str], list[Bar]] = defaultdict(list)
    for event in drawn:
        if isinstance(event, Bar):
            lanes[event.process, event.lane].append(event)
    for bars in lanes.values():
        bars.sort(key=lambda bar: (bar.start_s, bar.end_s))
        assert all(one.end_s <= other.start_s + tolerance_s for one, other in pairwise(bars))
    for event in drawn:
        if isinstance(event, Arrow):
            for place, at_s in (
                ((event.from_process, event.from_lane), event.from_s),
                ((event.to_process, event.to_lane), event.to_s),
            ):
                assert any(
                    bar.start_s - tolerance_s <= at_s <= bar.end_s + tolerance_s for bar in lanes[place]
                )
