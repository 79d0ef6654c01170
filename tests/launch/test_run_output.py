"""What a run shows: the metrics as they come, progress, and the report at its end."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from helpers.plans import two_towers
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import write_json
from spindle_cli.files.run_files import (
    METRICS_FILE,
    PREDICTED_FILE,
    Comparison,
    DeviceTimes,
    MetaOpComparison,
    PredictedVsMeasured,
    StartUp,
    StepMetrics,
    TypeTimes,
)
from spindle_cli.files.runs.records import Pace
from spindle_cli.launch.attempts import MetricsFollower, Watch, live_progress, progress_text
from spindle_cli.launch.build import build_launch
from spindle_cli.launch.run import samples_per_step
from spindle_cli.launch.types import Address, LaunchOptions, NodeShare
from spindle_cli.launch.watching.run_report import render_report, report_run, speed_lines
from spindle_cli.launch.watching.signals import Signals


def step(number: int, loss: float = 1.0, iteration_s: float = 0.5) -> StepMetrics:
    return StepMetrics(step=number, loss=loss, task_losses={"a": loss, "b": 2.0}, iteration_s=iteration_s)


def test_every_line_is_handed_out_once_and_only_whole(tmp_path: Path) -> None:
    follower = MetricsFollower(tmp_path)
    assert follower.new() == []
    first, second = step(1).to_line(), step(2).to_line()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(first + second[:10])
        file.flush()
        assert [metrics.step for metrics in follower.new()] == [1]
        assert follower.new() == []
        file.write(second[10:])
        file.flush()
        assert [metrics.step for metrics in follower.new()] == [2]


def test_a_resumed_run_starts_after_the_lines_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text(step(1).to_line())
    follower = MetricsFollower(tmp_path)
    with path.open("a") as file:
        file.write(step(2).to_line())
    assert [metrics.step for metrics in follower.new()] == [2]


def test_a_task_that_counts_nothing_is_warned_of_once(tmp_path: Path) -> None:
    said: list[str] = []
    _, plan = two_towers()
    share = NodeShare(0, 1, 2, Address("127.0.0.1", 0), "lo")
    launch = build_launch(plan, Path("plan.yaml"), "w", tmp_path, share, LaunchOptions(steps=9))
    watch = Watch(launch, MetricsFollower(tmp_path), Signals(), lambda metrics: None, said.append, [])
    uncounted = {2: ("a",), 3: ("a", "b"), 4: ("b",)}
    with (tmp_path / METRICS_FILE).open("w") as file:
        for number in range(1, 6):
            named = step(number).model_copy(update={"uncounted_tasks": uncounted.get(number, ())})
            file.write(named.to_line())
    watch.poll()
    assert [line.split(" counts")[0] for line in said] == [
        "warning: step 2: in the loss of task 'a' a mean",
        "warning: step 3: in the loss of task 'b' a mean",
    ]


def test_the_first_skipped_step_is_told_of(tmp_path: Path) -> None:
    said: list[str] = []
    _, plan = two_towers()
    share = NodeShare(0, 1, 2, Address("127.0.0.1", 0), "lo")
    launch = build_launch(plan, Path("plan.yaml"), "w", tmp_path, share, LaunchOptions(steps=9))
    watch = Watch(launch, MetricsFollower(tmp_path), Signals(), lambda metrics: None, said.append, [])
    with (tmp_path / METRICS_FILE).open("w") as file:
        for number, skipped in enumerate((False, True, True, False), start=1):
            line = step(number).model_copy(update={"loss_scale": 2.0**-number, "skipped": skipped})
            file.write(line.to_line())
    watch.poll()
    assert [(line.loss_scale, line.skipped) for line in watch.steps] == [
        (0.5, False),
        (0.25, True),
        (0.125, True),
        (0.0625, False),
    ]
    assert len(said) == 1
    assert said[0].startswith("step 2 was skipped: a gradient overflowed at a loss scale of 0.25, and")


@pytest.mark.parametrize(
    ("flags", "count", "said"),
    [
        ((True, False, True), 2, "3 steps (2 of them skipped), loss"),
        ((False, False), 0, "2 steps, loss"),
        ((None, None), None, "2 steps, loss"),
    ],
)
def test_the_runs_end_says_how_many_steps_were_skipped(
    flags: tuple[bool | None, ...], count: int | None, said: str, tmp_path: Path
) -> None:
    _, plan = two_towers()
    share = NodeShare(0, 1, 2, Address("127.0.0.1", 0), "lo")
    launch = build_launch(plan, Path("plan.yaml"), "w", tmp_path, share, LaunchOptions(steps=9))
    steps = [step(number).model_copy(update={"skipped": flag}) for number, flag in enumerate(flags, start=1)]
    report = report_run(launch, steps, 8)
    assert report.skipped == count
    console = Console(file=(out := io.StringIO()), width=120)
    console.print(render_report(report))
    assert said in out.getvalue()


def test_lines_without_a_loss_scale_do_not_speak_of_one() -> None:
    assert not {"loss_scale", "skipped"} & json.loads(step(1).to_line()).keys()


def test_a_broken_line_is_refused_with_its_file(tmp_path: Path) -> None:
    follower = MetricsFollower(tmp_path)
    (tmp_path / METRICS_FILE).write_text("{oops\n")
    with pytest.raises(InputError, match=METRICS_FILE):
        follower.new()


def test_losses_that_are_not_finite_stay_json_and_come_back_as_nan() -> None:
    line = step(1, loss=float("inf")).to_line()
    assert '"loss": null' in line
    assert str(StepMetrics.from_line(line, where="here").loss) == "nan"


def test_progress_shows_losses_pace_and_time_left() -> None:
    pace = Pace()
    pace.add(0.5)
    text = progress_text(step(10, loss=0.25), pace, total_steps=130, samples_per_step=24)
    assert text == "loss 0.25, 48 samples/s, 1 min 00 s left, a 0.25 b 2"


def test_progress_is_drawn_on_a_terminal_only() -> None:
    for is_terminal in (True, False):
        drawn = io.StringIO()
        console = Console(file=drawn, force_terminal=is_terminal, width=120)
        with live_progress(console, 5, 8) as show:
            show(step(3))
        assert ("step 3/5" in drawn.getvalue()) == is_terminal


def test_the_report_has_predicted_against_measured_and_the_files(tmp_path: Path) -> None:
    _, plan = two_towers()
    assert samples_per_step(plan) == 8  # one task
    share = NodeShare(0, 1, 4, Address("127.0.0.1", 0), "lo")
    launch = build_launch(plan, Path("p.yaml"), "toy:build", tmp_path, share, LaunchOptions())
    compared = PredictedVsMeasured(
        steps=2,
        iteration=Comparison(predicted_s=2.0, measured_s=3.0),
        metaops=(MetaOpComparison(metaop="pairs/vision", predicted_s=1.0, measured_s=0.9),),
        start_up=StartUp(first_step_s=4.5, stages={"checks": 1.5, "processes": 3.0}),
    )
    write_json(tmp_path / PREDICTED_FILE, compared)
    steps = [step(1, 2.0, iteration_s=9.0), step(2, 1.5), step(3, 1.0)]
    report = report_run(launch, steps, samples_per_step=8)
    assert report.samples_per_s == 16  # without the first step, which warms up
    drawn = io.StringIO()
    Console(file=drawn, width=100).print(render_report(report))
    rows = [line.split() for line in drawn.getvalue().splitlines()]
    assert ["│", "pairs/vision", "│", "1", "s", "│", "900", "ms", "│", "-10.0%", "│"] in rows
    assert ["│", "iteration", "│", "2", "s", "│", "3", "s", "│", "+50.0%", "│"] in rows
    assert "3 steps, loss 2 -> 1, 16 samples/s" in drawn.getvalue()
    assert "first step after 4.5 s: checks 1.5 s, processes 3 s" in drawn.getvalue()
    assert set(report.files) == {"predicted against measured"}


def test_types_and_slow_devices_are_said_where_there_are_several_or_any() -> None:
    def device(number: int, kind: str, least_s: float) -> DeviceTimes:
        times = {"compute_s": 9.0, "wait_s": 0.0, "data_s": 0.0, "predicted_compute_s": 2.0}
        return DeviceTimes(device=number, type=kind, least_compute_s=least_s, **times)

    old, new = (
        TypeTimes(type=kind, num_devices=count, predicted_s=3.0, measured_s=measured_s)
        for kind, count, measured_s in (("cpu-old", 1, 4.0), ("cpu-new", 2, 3.0))
    )
    devices = (device(0, "cpu-old", 2.5), device(1, "cpu-new", 2.0), device(2, "cpu-new", 3.0))
    compared = PredictedVsMeasured(
        steps=2, iteration=Comparison(predicted_s=2, measured_s=3), devices=devices, types=(old, new)
    )
    slow = "slower than the profile all through the run: device 2 (cpu-new) by 50%, 0 (cpu-old) by 25%"
    assert speed_lines(compared) == [
        "speed, of the profile's: cpu-old 75% (1 device), cpu-new 100% (2 devices)",
        slow,
    ]
    assert speed_lines(compared.model_copy(update={"types": (new,)})) == [slow]
    assert speed_lines(compared.model_copy(update={"types": (new,), "devices": devices[1:2]})) == []
    many = tuple(device(number, "cpu", 4.0) for number in range(10))
    (line,) = speed_lines(compared.model_copy(update={"types": (), "devices": many}))
    assert line.endswith("7 (cpu) by 100%, and 2 more")
