"""What processors do beside the slices: hand-solved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import metaop_of, slice_of
from spindle_cli.calibrate.beside import Beside, processor_times
from spindle_cli.plan.types import Slice

LAYERS = metaop_of("a/x", 8, {1: 1.0, 2: 0.5})


def piece(first: int, last: int, *devices: int) -> Slice:
    return slice_of(LAYERS, (first, last), devices, 0.0)


def beside(
    slices: list[Slice], took_s: list[float], beside_s: list[float], outside_s: list[float] | None = None
) -> Beside:
    return Beside(slices, took_s, beside_s, outside_s or [0.0] * len(beside_s))


def test_what_is_left_of_a_device_is_what_it_computed_less_what_it_did_beside() -> None:
    """10 s measured with 2 s beside: 8 s of its own, each slice by 10 / 8."""
    run = beside([piece(0, 1, 0), piece(1, 4, 0)], [4.0, 6.0], [2.0])
    assert run.stretches(1.0) == pytest.approx([1.25, 1.25])
    assert run.stretches(0.5) == pytest.approx([10 / 9, 10 / 9])
    assert run.stretches(0.0) == [1.0, 1.0]


def test_a_slice_on_two_devices_is_as_slow_as_the_slower_one() -> None:
    """Device 0 does nothing beside. Device 1: the joint slice 4 s, 6 s alone, of 10 s 2 s beside."""
    run = beside([piece(0, 2, 0, 1), piece(2, 3, 1), piece(3, 4, 0)], [4.0, 6.0, 5.0], [0.0, 2.0])
    assert run.stretches(1.0) == pytest.approx([1.25, 1.25, 1.0])


def test_what_a_device_did_outside_of_its_slices_is_not_in_them() -> None:
    run = beside([piece(0, 1, 0)], [10.0], [3.0], [1.0])
    assert run.stretches(1.0) == pytest.approx([10 / 8])
    assert beside([piece(0, 1, 0)], [10.0], [3.0], [4.0]).stretches(1.0) == [1.0]


def test_a_device_that_computed_nothing_does_not_matter() -> None:
    run = beside([piece(0, 1, 0)], [10.0], [0.0, 3.0])
    assert run.stretches(1.0) == [1.0]
    assert processor_times([run]) == 1.0


def test_costs_that_would_leave_less_than_half_of_what_was_seen_are_too_large() -> None:
    slices = [piece(0, 1, 0), piece(1, 2, 1)]
    assert processor_times([beside(slices, [10.0, 10.0], [5.0, 1.0])]) == 1.0
    assert processor_times([beside(slices, [10.0, 10.0], [5.0000000001, 1.0])]) == 1.0  # but for rounding
    assert processor_times([beside(slices, [10.0, 10.0], [8.0, 1.0])]) == 0.625
    assert processor_times([beside(slices, [10.0, 10.0], [8.0, 1.0], [2.0, 0.0])]) == pytest.approx(0.875)


def told(times: float, off: tuple[float, ...] = (0, 0, 0, 0)) -> Beside:
    """Four devices with equal ops of 6 s and, by the profile, 0 to 3 s beside, which are `times` that."""
    slices = [piece(2 * n, 2 * n + 1, n) for n in range(4)]
    took_s = [6.0 + times * n + more for n, more in enumerate(off)]
    return beside(slices, took_s, [0.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize("times", [0.0, 0.5, 1.0, 1.5])
def test_equal_ops_beside_more_and_less_of_it_tell_the_costs_apart(times: float) -> None:
    assert processor_times([told(times)]) == pytest.approx(times, abs=1e-9)


def test_where_they_do_not_agree_or_are_too_few_costs_stay() -> None:
    assert processor_times([told(0.5, off=(0, 2.0, -2.0, 0))]) == 1.0
    few = told(0.5)
    assert processor_times([beside(few.slices[:3], few.took_s[:3], few.beside_s)]) == 1.0
    # Hardly better: what is seen of other work is within what ops differ by anyway.
    assert processor_times([told(0.9, off=(0, 0.2, -0.2, 0))]) == 1.0


def test_less_beside_more_of_it_says_that_it_takes_nothing() -> None:
    assert processor_times([told(-0.1)]) == pytest.approx(0.0, abs=1e-9)


def test_several_runs_tell_together() -> None:
    run = told(0.5)
    halves = [
        beside(run.slices[:2], run.took_s[:2], run.beside_s),
        beside(run.slices[2:], run.took_s[2:], run.beside_s),
    ]
    assert processor_times(halves) == pytest.approx(0.5)


def test_slices_that_compute_again_say_nothing_of_the_costs() -> None:
    run = told(0.5)
    again = slice_of(LAYERS, (0, 1), (4,), 0.0, recompute=True)
    longer = beside([*run.slices, again], [*run.took_s, 9.0], [*run.beside_s, 0.5])
    assert processor_times([longer]) == pytest.approx(0.5)


def test_slices_on_other_shares_or_types_are_not_set_against_each_other() -> None:
    run = told(0.5)
    uneven = [each.model_copy(update={"rows": (0, 8 - number)}) for number, each in enumerate(run.slices)]
    assert processor_times([replace(run, slices=uneven)]) == 1.0
    counts = [each.model_copy(update={"micro_batches": n}) for n, each in enumerate(run.slices, start=1)]
    assert processor_times([replace(run, slices=counts)]) == 1.0
    assert processor_times([replace(run, type_of=("a", "b", "c", "d"))]) == 1.0
    assert processor_times([replace(run, type_of=("a", "a", "a", "a"))]) == pytest.approx(0.5)
