"""A run is read as it comes, each line once, and thinned without losing what stands out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from spindle_cli.files.run_files import METRICS_FILE, forget_metrics_after
from spindle_cli.files.runs.records import Evaluation, Pace, Tail, append_evaluation
from spindle_cli.report.run import Evaluations, Follower
from spindle_cli.report.series import Series
from spindle_cli.units import format_seconds
from watch.runs import append, step


def read(follower: Follower) -> Follower:
    while follower.look():
        pass
    return follower


def test_a_line_is_handed_out_once_and_only_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path, chunk_bytes=4)
    assert tail.look().lines == ()
    path.write_bytes(b"a\nbc")
    assert tail.look().lines == ((1, b"a"),)
    with path.open("ab") as file:
        file.write(b"d\ne\n")
    found = tail.look()
    assert (found.lines, found.left_bytes, found.begun_anew) == (((2, b"bcd"), (3, b"e")), 0, False)
    assert tail.look().lines == ()


@pytest.mark.parametrize("new", [b"x\n", b"xx\nyy\nzz\n", b""])
def test_a_file_written_anew_in_its_place_is_read_from_its_beginning(tmp_path: Path, new: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a\nb\n")
    tail = Tail(path)
    tail.look()
    path.write_bytes(new)  # the same inode: only its content tells
    found = tail.look()
    assert found.begun_anew
    assert [line for _, line in found.lines] == new.splitlines()


def test_a_chunk_is_read_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"ab\ncd\n")
    tail = Tail(tmp_path / "lines", chunk_bytes=4)
    assert (tail.look().left_bytes, tail.look().lines) == (2, ((2, b"cd"),))


def test_a_spike_of_one_step_stays_in_however_few_points() -> None:
    series = Series({"pairs": 10.0, "other": 99.0}, max_points=2)
    losses = [1.0, 2.0, 900.0, 5.0, 3.0]
    for number, loss in enumerate(losses, start=1):
        assert series.add(step(number, loss, iteration_s=0.5 * number, data_wait_s=0.1 * number))
    first, last = series.points
    assert (series.steps_per_point, series.num_steps, first.step, last.step) == (4, 5, 4, 5)
    assert (first.loss, first.loss_range) == (227.0, (1.0, 900.0))
    assert first.task_loss_ranges == {"pairs": (1.0, 900.0)}
    assert (first.iteration_s, first.iteration_range_s) == (1.25, (0.5, 2.0))
    assert first.flops_per_s == pytest.approx(4 * 10.0 / 5.0)
    assert (first.data_wait_s, first.data_wait_most_s) == pytest.approx((0.25, 0.4))
    assert (last.loss, last.loss_range, last.task_loss_ranges) == (3.0, None, None)


def test_memory_is_the_least_and_the_most_and_a_broken_loss_breaks_its_point() -> None:
    series = Series(max_points=1)
    for number, loss, least, most in ((1, 1.0, 30, 50), (2, math.nan, 20, 80), (3, 4.0, 25, 60)):
        series.add(step(number, loss, least_memory_bytes=least, most_memory_bytes=most))
    (point,) = series.points
    assert (point.least_memory_bytes, point.most_memory_bytes) == (20, 80)
    assert (point.loss, point.loss_range, point.flops_per_s) == (None, (1.0, 4.0), None)


@examples(40)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=70), st.integers(1, 9))
def test_points_cover_every_step_once_with_its_extremes(losses: list[float], most: int) -> None:
    series = Series(max_points=most)
    for number, loss in enumerate(losses, start=1):
        series.add(step(number, loss))
    points = series.points
    assert len(points) <= most
    assert points[-1].step == len(losses)
    ranges = [point.loss_range or (point.loss, point.loss) for point in points]
    assert min(low for low, _ in ranges) == pytest.approx(min(losses))
    assert max(high for _, high in ranges) == pytest.approx(max(losses))


@pytest.mark.parametrize("count", [5, 700])
def test_steps_done_again_count_once_also_where_points_are_means(tmp_path: Path, count: int) -> None:
    append(tmp_path, *(step(number, 1.0) for number in range(1, count + 1)))
    append(tmp_path, *(step(number, 7.0) for number in range(count - 2, count + 1)))
    follower = read(Follower(tmp_path, None))
    assert (follower.steps.num_steps, follower.steps.last and follower.steps.last.step) == (count, count)
    total = {1: 2 + 21, 2: 697 + 21}[follower.steps.steps_per_point]
    size = follower.steps.steps_per_point
    assert sum((point.loss or 0) * size for point in follower.steps.points) == total
    assert follower.steps.points[-1].loss == 7.0


def test_a_run_that_goes_on_from_a_checkpoint_forgets_the_steps_after_it(tmp_path: Path) -> None:
    append(tmp_path, *(step(number) for number in range(1, 6)))
    follower = read(Follower(tmp_path, None))
    forget_metrics_after(tmp_path, 3)
    read(follower)
    assert follower.steps.last is not None and follower.steps.last.step == 3
    append(tmp_path, step(4, 9.0))
    assert read(follower).steps.points[-1].loss == 9.0


def test_damage_is_told_with_its_line_and_the_rest_is_read(tmp_path: Path) -> None:
    append(tmp_path, step(1), rest='{"step": 0}\n')
    append(tmp_path, step(2), rest='{"step": 3, "lo')
    told: list[str] = []
    follower = read(Follower(tmp_path, None, lambda error: told.append(error.message)))
    assert follower.steps.num_steps == 2
    assert len(told) == 1 and f"{METRICS_FILE}:2" in told[0]


def test_evaluations_are_read_and_the_newest_always_shown(tmp_path: Path) -> None:
    for number in (2, 4, 4):
        append_evaluation(
            tmp_path,
            Evaluation(step=number, task="a", num_samples=3, loss=math.nan, metrics={"m": 1.5}, seconds=2),
        )
    points = read(Follower(tmp_path, None)).evaluations.points
    assert [(point.step, point.loss, point.metrics) for point in points] == [
        (2, None, {"m": 1.5}),
        (4, None, {"m": 1.5}),
    ]
    many = Evaluations(max_points=3)
    for number in range(1, 9):
        many.add(Evaluation(step=number, task="a", num_samples=1, loss=1.0, seconds=0.5))
    assert [point.step for point in many.points] == [1, 5, 8]
    assert many.seconds == 4.0


def test_time_left_is_the_usual_step_and_what_comes_between() -> None:
    pace = Pace()
    assert pace.left_s(5) is None
    for iteration_s, seen_s in ((9.0, 100.0), (1.0, 101.0), (1.0, 105.0)):
        pace.add(iteration_s, seen_s)
    assert (pace.step_s, pace.between_s) == (1.0, 1.5)  # 5 s for two steps of 1 s
    assert pace.left_s(4, pace.between_s) == 10.0
    assert pace.left_s(-1) == 0.0


@pytest.mark.parametrize(
    ("value", "text"),
    [(3599, "59 min 59 s"), (3600, "1 h 00 min"), (86399, "23 h 59 min"), (180000, "2 d 02 h")],
)
def test_long_times_are_said_in_hours_and_days(value: float, text: str) -> None:
    assert format_seconds(value) == text
