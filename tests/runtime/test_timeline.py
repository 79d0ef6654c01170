"""Every rank's times on one clock."""

from __future__ import annotations

from pathlib import Path

import torch
from alone import run_case, world_of_one
from case_runs import ADAMW, Case

from helpers.plans import two_towers
from helpers.timelines import simulated_timeline
from spindle_cli.files.runs.records import TIMELINE_FILE, MeasuredTimeline
from spindle_cli.launch.watching.run_report import write_run_trace
from spindle_cli.plan.types import Plan
from spindle_cli.report.run import measured_iteration
from spindle_cli.runtime.measuring.timeline import offset_of
from spindle_cli.runtime.measuring.timing import Activity, Stopwatch
from spindle_cli.simulate.run import simulate


def test_an_answer_is_halfway_between_question_and_arrival_or_half_of_it_off() -> None:
    offset = offset_of(asked_s=10.0, theirs_s=25.5, answered_s=11.0)
    assert (offset.ahead_s, offset.error_s) == (15.0, 0.5)


def test_clocks_that_differ_give_the_same_timeline() -> None:
    _, plan = two_towers()
    together = simulated_timeline(plan, {}, (1.0, 2.0))
    assert simulated_timeline(plan, {1: 7.0, 2: -3.0}, (1.0, 2.0)) == together
    assert together.clock_error_s == 1e-5
    assert [step.step for step in together.steps] == [1, 2]


def test_a_transfer_lasts_until_the_slice_that_takes_it_begins() -> None:
    _, plan = two_towers()
    simulation = simulate(plan)
    (step,) = simulated_timeline(plan, {3: 5.0}).steps
    started = {
        (span.device, span.activity.value, span.slice_index): span.start_s for span in simulation.spans
    }
    found = [span for spans in step.devices for span in spans if span.kind == "transfer"]
    assert len(found) == len(simulation.passages) > 0
    for span in found:
        assert span.peer is not None and span.slice is not None
        activity = "backward" if span.is_gradient else "forward"
        assert abs(span.end_s - started[span.peer, activity, span.slice]) < 1e-6


def test_waits_for_nothing_are_left_out() -> None:
    _, plan = two_towers()
    (step,) = simulated_timeline(plan, {}).steps
    assert not [span for spans in step.devices for span in spans if span.cause == "losses"]


def test_a_stopwatch_keeps_its_last_steps() -> None:
    stopwatch = Stopwatch(torch.device("cpu"), keep_steps=2)
    for step in range(4):
        stopwatch.begin_step()
        with stopwatch.timed(Activity.FORWARD, 1):
            pass
        stopwatch.end_step(step)
    assert [kept.step for kept in stopwatch.steps] == [2, 3]
    kept = stopwatch.steps[0]
    times = [stopwatch.clock_s(mark) for mark in (kept.begin, kept.laps[0].begin, kept.laps[0].end, kept.end)]
    assert times == sorted(times)


def test_every_step_of_a_sampled_run_has_the_slices_of_its_own_tasks(tmp_path: Path) -> None:
    """Steps 1 and 3 run both tasks by the plan of all, step 2 one by a plan of its own, which cuts its layers
    in two.
    """
    alone = [
        ("classify/layers", (0, 2), (0,)),
        ("classify/layers", (2, 3), (0,)),
        ("classify/head", (0, 1), (0,)),
    ]
    train = {**ADAMW, "sampling": {"every": {"pairs": 2}}}
    sets = {"classify+pairs": None, "classify": alone}
    case = Case("sampled", (0,), "eval_toys", args={"evaluates": False}, train=train, sets=sets)
    with world_of_one():
        request = run_case(case, tmp_path / "sampled", capture_dir=None)
    plan = Plan.read(request.plan)
    timeline = MeasuredTimeline.read(request.run_dir / TIMELINE_FILE)
    found = [
        [plan.every_slice[span.slice].label for span in step.devices[0] if span.kind == "forward"]
        for step in timeline.steps
    ]
    assert found[0] == found[2] == [piece.label for piece in plan.slices]
    assert found[1] == ["classify/layers[0:2]", "classify/layers[2:3]", "classify/head[0:1]"]
    assert write_run_trace(tmp_path / "trace.json", plan, request.run_dir)
    trace = (tmp_path / "trace.json").read_text()
    assert "classify/layers[2:3] backward" in trace
    drawn = measured_iteration(plan, request.run_dir)
    assert drawn is not None and drawn.step in (1, 3)
