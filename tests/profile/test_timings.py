"""When enough has been measured, and what is said of it."""

from __future__ import annotations

import pytest

from spindle_cli.profile.machine.machine import DeviceType
from spindle_cli.profile.measuring import settings
from spindle_cli.profile.measuring.settings import shared_limits
from spindle_cli.profile.op.timings import (
    GRANTED_TIME_BLOCK_S,
    SHARED_CORES_BLOCK_S,
    Limits,
    Sample,
    is_enough,
    runs_per_repeat,
    slowest_of,
    spread_of,
    summarise,
)

LIMITS = Limits(spread=0.05, max_s=1.0, min_repeats=5, max_repeats=20)


def samples(*seconds: float) -> list[Sample]:
    return [Sample(value / 4, value * 3 / 4) for value in seconds]


def test_equal_repeats_are_enough_at_once() -> None:
    assert not is_enough(samples(*[1.0] * 4), 0.1, LIMITS)
    assert is_enough(samples(*[1.0] * 5), 0.1, LIMITS)


def test_scattered_repeats_go_on_until_the_time_or_the_number_is_used_up() -> None:
    scattered = samples(1, 2, 1, 2, 1, 2)
    assert not is_enough(scattered, 0.5, LIMITS)
    assert is_enough(scattered, 1.0, LIMITS)
    assert is_enough(samples(*[1, 2] * 10), 0.5, LIMITS)


def test_a_very_slow_op_gets_three_repeats() -> None:
    assert not is_enough(samples(10, 10), 20.0, LIMITS)
    assert is_enough(samples(10, 10, 10), 30.0, LIMITS)


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    assert spread_of([1, 2, 3, 4, 5]) == pytest.approx(2 / 3)
    assert spread_of([7.0]) == 0


def test_the_median_is_not_moved_by_one_repeat_that_was_disturbed() -> None:
    times = summarise(samples(1, 1, 1, 1, 50))
    assert times.forward_s + times.backward_s == pytest.approx(1)
    assert times.repeats == 5


def test_together_processes_take_as_long_as_the_slowest_in_each_repeat() -> None:
    alone, both = slowest_of([samples(1, 3, 1), samples(2, 2, 2)])
    assert alone.forward_s + alone.backward_s == pytest.approx(1)
    assert both.forward_s + both.backward_s == pytest.approx(2)


def test_short_ops_are_repeated_until_they_fill_a_block() -> None:
    assert runs_per_repeat(0.0001, Limits(block_s=0.025)) == 250
    assert runs_per_repeat(1.0, Limits(block_s=0.025)) == 1


@pytest.mark.parametrize(
    ("device", "processes", "threads", "time", "block_s"),
    [
        ("cpu", 2, 2, 2.0, SHARED_CORES_BLOCK_S),
        ("cpu", 1, 2, 2.0, 0.002),
        ("cpu", 1, 2, 1.5, GRANTED_TIME_BLOCK_S),  # it may run on two, for less than all of their time
        ("cpu", 4, 1, 1.5, 0.002),  # by processor time
        ("cuda", 4, 2, 1.5, 0.002),
    ],
)
def test_repeats_are_long_where_wall_time_is_of_several_turns(
    device: DeviceType,
    processes: int,
    threads: int,
    time: float,
    block_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings, "own_cores", lambda: frozenset({0, 1}))
    monkeypatch.setattr(settings, "cores_of_time", lambda: time)
    assert shared_limits(Limits(max_s=3.0), device, processes, threads) == Limits(max_s=3.0, block_s=block_s)
