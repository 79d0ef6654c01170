"""What a rank's stopwatch makes of its steps."""

from __future__ import annotations

import pytest
import torch

from spindle_cli.runtime.measuring import timing
from spindle_cli.runtime.measuring.timing import Activity, Stopwatch

CPU = torch.device("cpu")


class Clock:
    """That of `time`, in which no time passes by itself."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What a stopwatch reads."""
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


def test_the_first_step_is_not_in_the_medians(clock: Clock) -> None:
    stopwatch = Stopwatch(CPU)
    for seconds in (50.0, 1.0, 3.0):
        for share in (0.25, 0.75):  # a slice may run in several blocks
            with stopwatch.timed(Activity.FORWARD, 3):
                clock.now_s += share * seconds
        clock.now_s += 100.0
        stopwatch.end_step(0)
    stopwatch.close()
    assert stopwatch.medians()[Activity.FORWARD, 3] == 2.0
    assert stopwatch.seconds[Activity.FORWARD, 3] == [50.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("steps_s", "least_s"),
    [
        ((), 0.0),
        ((9.0,), 9.0),
        ((1.0, 4.0, 3.0), 3.0),  # each a part of its own, without the first
        ((1.0, *(8.0, 2.0, 8.0), *(7.0, 7.0, 9.0), *(9.0, 9.0, 9.0), *(6.0, 9.0, 10.0)), 7.0),
        ((1.0, *(5.0, 5.0), *(9.0,) * 6), 5.0),  # fast for a quarter of the run
        ((1.0, 5.0, *(9.0,) * 11), 9.0),  # and for less
    ],
)
def test_what_lasts_all_through_a_run_is_that_of_its_fastest_quarter(
    clock: Clock, steps_s: tuple[float, ...], least_s: float
) -> None:
    stopwatch = Stopwatch(CPU)
    for seconds in steps_s:
        with stopwatch.timed(Activity.FORWARD, 3):
            clock.now_s += seconds / 4
        with stopwatch.timed(Activity.BACKWARD, 5):
            clock.now_s += seconds * 3 / 4
        with stopwatch.timed(Activity.OPTIMIZER):
            clock.now_s += 100.0
        stopwatch.end_step(0)
    stopwatch.close()
    assert stopwatch.computed_s == list(steps_s)
    assert stopwatch.least_compute_s() == least_s


def test_time_in_a_block_inside_another_is_counted_once(clock: Clock) -> None:
    stopwatch = Stopwatch(CPU, keep_steps=1)
    stopwatch.begin_step()
    with stopwatch.timed(Activity.FORWARD, 3):
        clock.now_s += 2.0
        with stopwatch.timed(Activity.WAIT, 3, "activation"):
            clock.now_s += 20.0
        clock.now_s += 3.0
    clock.now_s += 4.0
    stopwatch.end_step(0)
    stopwatch.close()
    seconds = {key: values[0] for key, values in stopwatch.seconds.items()}
    assert seconds == {
        (Activity.FORWARD, 3): 5.0,
        (Activity.WAIT, None): 20.0,
        (Activity.OTHER, None): 4.0,
    }
    (step,) = stopwatch.steps
    assert [lap.kind for lap in step.laps] == [Activity.FORWARD, Activity.WAIT, Activity.FORWARD]
    assert step.laps[0].end == step.laps[1].begin and step.laps[1].end == step.laps[2].begin


class Event:
    """A moment of a GPU's, which counts milliseconds in float32, and a millionth too fast."""

    clock: Clock

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self._ms = self.clock.now_s * (1 + 1e-6) * 1e3

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return float(torch.tensor(end._ms - self._ms, dtype=torch.float32))


def test_the_last_steps_of_a_long_run_are_put_on_the_hosts_clock_exactly(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ten hours float32 has milliseconds to four of them, and the device's clock is 36 ms ahead."""
    Event.clock = clock
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    clock.now_s = 7.0
    stopwatch = Stopwatch(torch.device("cuda", 0), keep_steps=1)
    clock.now_s += 36_000.0
    stopwatch.begin_step()
    clock.now_s += 0.01
    with stopwatch.timed(Activity.FORWARD, 3):
        clock.now_s += 0.001
    stopwatch.end_step(0)
    stopwatch.close()
    (kept,) = stopwatch.steps
    (lap,) = kept.laps
    expected = [36_007.0, 36_007.01, 36_007.011]
    found = [stopwatch.clock_s(mark) for mark in (kept.begin, lap.begin, lap.end)]
    assert found == pytest.approx(expected, abs=1e-6, rel=0)
