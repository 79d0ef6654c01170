"""Traces: the format, and that everything simulated is in them."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings

from helpers.plans import two_towers
from helpers.random_plans import plans
from spindle_cli.plan.types import Plan
from spindle_cli.simulate.events import trace_events, write_trace
from spindle_cli.simulate.run import simulate
from spindle_cli.trace import Arrow, Bar, stack


def test_overlapping_spans_are_stacked_on_as_few_layers_as_it_takes() -> None:
    spans = [(0.0, 2.0, "a"), (1.0, 3.0, "b"), (2.0, 4.0, "c"), (3.0, 5.0, "d")]
    assert stack(spans) == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]


@settings(max_examples=40, deadline=None)
@given(plans())
def test_bars_of_a_lane_do_not_overlap_and_arrows_end_on_bars(plan: Plan) -> None:
    events = trace_events(simulate(plan))
    lanes: dict[tuple[int, str], list[Bar]] = defaultdict(list)
    for event in events:
        if isinstance(event, Bar):
            lanes[event.process, event.lane].append(event)
    for bars in lanes.values():
        bars.sort(key=lambda bar: (bar.start_s, bar.end_s))
        assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(bars))
    for event in events:
        if isinstance(event, Arrow):
            for place, at_s in (
                ((event.from_process, event.from_lane), event.from_s),
                ((event.to_process, event.to_lane), event.to_s),
            ):
                assert any(bar.start_s <= at_s <= bar.end_s for bar in lanes[place])


def test_the_file_is_in_the_chrome_trace_format(tmp_path: Path) -> None:
    simulation = simulate(two_towers()[1])
    path = tmp_path / "trace.json"
    write_trace(path, simulation)
    events = json.loads(path.read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    ends_us = [event["ts"] + event["dur"] for event in bars]
    assert abs(max(ends_us) - simulation.iteration_s * 1e6) < 1
    computes = [event for event in bars if event["cat"] in ("forward", "backward")]
    assert len(computes) == len(simulation.spans)
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} >= {
        "1 compute",
        "3 sums",
    }
    starts = [event["id"] for event in events if event["ph"] == "s"]
    assert sorted(starts) == sorted(event["id"] for event in events if event["ph"] == "f")
