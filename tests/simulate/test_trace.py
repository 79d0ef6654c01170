"""Traces: the format, and that everything simulated is in them."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given

from helpers.examples import examples
from helpers.plans import two_towers
from helpers.random_plans import plans
from helpers.traces import require_drawable
from spindle_cli.files.runs.chrome_trace import stack
from spindle_cli.plan.types import Plan
from spindle_cli.simulate.events import trace_events, write_trace
from spindle_cli.simulate.run import simulate


def test_overlapping_spans_are_stacked_on_as_few_layers_as_it_takes() -> None:
    spans = [(0.0, 2.0, "a"), (1.0, 3.0, "b"), (2.0, 4.0, "c"), (3.0, 5.0, "d")]
    assert stack(spans) == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]


@examples(40)
@given(plans())
def test_bars_of_a_lane_do_not_overlap_and_arrows_end_on_bars(plan: Plan) -> None:
    require_drawable(trace_events(simulate(plan)), tolerance_s=1e-9)


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
