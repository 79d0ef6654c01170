"""Timelines in the Chrome trace format, for https://ui.perfetto.dev or chrome://tracing.

Format: "Trace Event Format" (Google). A *process* is drawn as a group of rows and a *thread* as a row; here a
process is a device, and its rows are named lanes. Events of a lane must not overlap unless nested: `stack`
spreads those that do over several lanes.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

# A device's lanes, predicted and measured alike.
COMPUTE = "1 compute"
SENDS = "2 sends"
SUMS = "3 sums"

Details = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that lasts, on a lane of a process; `details` are shown when it is clicked."""

    process: int
    lane: str
    name: str
    category: str
    start_s: float
    end_s: float
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arrow:
    """From a time on one lane to a time on another; each end must lie on a bar."""

    number: int
    name: str
    from_process: int
    from_lane: str
    from_s: float
    to_process: int
    to_lane: str
    to_s: float


@dataclass(frozen=True, slots=True)
class Level:
    """Sets one of a process's counters to a value from `at_s` on."""

    process: int
    counter: str
    at_s: float
    value: float


TraceEvent = Bar | Arrow | Level

T = TypeVar("T")


def stack(spans: Iterable[tuple[float, float, T]]) -> list[tuple[int, T]]:
    """Spread spans (start_s, end_s, what) over as few layers as it takes for none to overlap: [(layer,
    what)].

    Spans must come ascending by start.
    """
    free: list[int] = []
    ending: list[tuple[float, int]] = []
    layers: list[tuple[int, T]] = []
    for start_s, end_s, what in spans:
        while ending and ending[0][0] <= start_s:
            heapq.heappush(free, heapq.heappop(ending)[1])
        layer = heapq.heappop(free) if free else len(ending)
        heapq.heappush(ending, (end_s, layer))
        layers.append((layer, what))
    return layers


def trace_text(process_names: Mapping[int, str], events: Sequence[TraceEvent]) -> str:
    """A trace file; lanes are drawn in the order of their names."""
    lanes = sorted({lane for event in events for lane in _lanes(event)})
    thread = {lane: number for number, lane in enumerate(lanes)}
    used = sorted({place for event in events for place in _places(event)})
    lines = [
        _line({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for process, name in process_names.items()
    ]
    lines += [
        _line({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
        for process in process_names
    ]
    lines += [
        _line({"ph": "M", "name": "thread_name", "pid": process, "tid": thread[lane], "args": {"name": lane}})
        for process, lane in used
    ]
    for event in events:
        lines.extend(map(_line, _chrome_events(event, thread)))
    return '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(lines) + "\n]}\n"


def _line(event: Mapping[str, object]) -> str:
    return json.dumps(event, separators=(",", ":"), allow_nan=False)


def _places(event: TraceEvent) -> tuple[tuple[int, str], ...]:
    if isinstance(event, Bar):
        return ((event.process, event.lane),)
    if isinstance(event, Arrow):
        return (event.from_process, event.from_lane), (event.to_process, event.to_lane)
    return ()


def _lanes(event: TraceEvent) -> tuple[str, ...]:
    return tuple(lane for _, lane in _places(event))


def _chrome_events(event: TraceEvent, thread: Mapping[str, int]) -> list[dict[str, object]]:
    """The format's events for one of ours; its times are in microseconds."""
    if isinstance(event, Bar):
        return [
            {
                "ph": "X",
                "name": event.name,
                "cat": event.category,
                "pid": event.process,
                "tid": thread[event.lane],
                "ts": _us(event.start_s),
                "dur": _us(event.end_s - event.start_s),
                "args": dict(event.details),
            }
        ]
    if isinstance(event, Level):
        args = {event.counter: event.value}
        return [{"ph": "C", "name": event.counter, "pid": event.process, "ts": _us(event.at_s), "args": args}]
    common: dict[str, object] = {"name": event.name, "cat": "arrow", "id": event.number}
    start = {"ph": "s", "pid": event.from_process, "tid": thread[event.from_lane], "ts": _us(event.from_s)}
    end = {"ph": "f", "bp": "e", "pid": event.to_process, "tid": thread[event.to_lane], "ts": _us(event.to_s)}
    return [common | start, common | end]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
