"""A run's trace: what was measured, in the rows of the simulation's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given

from helpers.examples import examples
from helpers.plans import two_towers
from helpers.random_plans import plans
from helpers.timelines import simulated_timeline
from helpers.traces import require_drawable
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import to_compact_json
from spindle_cli.files.runs.chrome_trace import Bar, TraceEvent
from spindle_cli.files.runs.records import MeasuredTimeline
from spindle_cli.launch.watching.run_report import require_writable, trace_events, write_run_trace
from spindle_cli.plan.types import Plan
from spindle_cli.simulate.events import trace_events as simulated_events
from spindle_cli.simulate.run import simulate


@examples(25)
@given(plans())
def test_bars_of_a_lane_do_not_overlap_and_arrows_end_on_bars(plan: Plan) -> None:
    events = trace_events(plan, simulated_timeline(plan, {1: 2.0}, (1.0, 1.5)))
    require_drawable(events, tolerance_s=1e-8)


def test_names_and_rows_are_those_of_the_predicted_trace() -> None:
    _, plan = two_towers()

    def drawn(events: Iterable[TraceEvent]) -> set[tuple[int, str, str, str]]:
        """What is drawn where; sends that overlap are spread over several lanes."""
        return {
            (event.process, event.lane[:7], event.name, str(event.category))
            for event in events
            if isinstance(event, Bar) and event.category != "wait"
        }

    measured = drawn(trace_events(plan, simulated_timeline(plan, {})))
    assert measured == drawn(simulated_events(simulate(plan)))


def test_the_file_is_in_the_chrome_trace_format(tmp_path: Path) -> None:
    _, plan = two_towers()
    timeline = simulated_timeline(plan, {}, (1.0, 1.0))
    assert not write_run_trace(tmp_path / "trace.json", plan, tmp_path)
    (tmp_path / "timeline.json").write_text(to_compact_json(timeline), encoding="utf-8")
    assert MeasuredTimeline.read(tmp_path / "timeline.json") == timeline
    assert write_run_trace(tmp_path / "trace.json", plan, tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ends_us = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert abs(max(ends_us) - 2 * simulate(plan).iteration_s * 1e6) < 1


def test_a_trace_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        require_writable(tmp_path / "missing" / "trace.json")
    with pytest.raises(InputError, match="is a folder"):
        require_writable(tmp_path)
