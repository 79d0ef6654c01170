"""A measured link, as the cost formulas read it back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spindle_cli.costs.links import transfer_s
from spindle_cli.profile.machine import link_speed
from spindle_cli.profile.machine.link_speed import CURVE_ELEMENTS, OneWay, as_link, as_measured


def test_message_times_come_back_from_the_link() -> None:
    seconds = {elements: 1e-4 + elements * 4 / 2e9 for elements in CURVE_ELEMENTS}
    measured = as_measured(OneWay(1e-4), {size: OneWay(s) for size, s in seconds.items()})
    link = as_link(measured)
    assert measured.latency_s == 1e-4
    for elements, message_s in seconds.items():
        # Below a tenth of the latency the bytes' own time is not known better than that.
        assert transfer_s(elements * 4, link) == pytest.approx(message_s, rel=0.12)


@given(st.lists(st.floats(1e-6, 1e-1), min_size=len(CURVE_ELEMENTS) + 1, max_size=len(CURVE_ELEMENTS) + 1))
def test_larger_messages_are_never_faster_whatever_was_seen(seen: list[float]) -> None:
    smallest, *larger = map(OneWay, seen)
    link = as_link(as_measured(smallest, dict(zip(CURVE_ELEMENTS, larger, strict=True))))
    times = [transfer_s(elements * 4, link) for elements in CURVE_ELEMENTS]
    assert all(later >= earlier * 0.89 for earlier, later in pairwise(times))


class StoppedNowAndThen:
    """Round trips of 200 us, 30 us of a processor, but every third of 9 ms, in which other threads ran on."""

    def __init__(self) -> None:
        self.trips: list[OneWay] = []

    def __call__(self, rank: int, message: torch.Tensor) -> OneWay:
        is_stopped = len(self.trips) % 3 == 2
        self.trips.append(OneWay(9e-3, 5e-3) if is_stopped else OneWay(2e-4, 3e-5))
        return self.trips[-1]


def test_a_process_that_is_stopped_now_and_then_does_not_change_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trips = StoppedNowAndThen()
    monkeypatch.setattr(link_speed, "_round_trip", trips)
    monkeypatch.setattr(link_speed.dist, "broadcast", lambda tensor, source: None)
    assert link_speed._one_way(0, 1, torch.device("cpu")) == OneWay(pytest.approx(1e-4), 1.5e-5)
    assert len(trips.trips) == 2 + 200  # as many as 0.12 s have of the faster of two, at most


def test_the_processor_s_time_is_of_a_message_and_of_its_bytes() -> None:
    """20 us for each message and 1 s for each 2 GB."""
    larger = {size: OneWay(1e-3, 20e-6 + size * 4 / 2e9) for size in CURVE_ELEMENTS}
    measured = as_measured(OneWay(1e-4, 20e-6), larger)
    assert measured.message_processor_s == 20e-6
    assert measured.processor_s_per_byte == pytest.approx(1 / 2e9)
    idle = as_measured(OneWay(1e-4, 20e-6), {size: OneWay(1e-3, 10e-6) for size in CURVE_ELEMENTS})
    assert idle.processor_s_per_byte == 0.0, "noise makes no negative time"
