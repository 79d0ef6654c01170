"""A measured link, as the cost formulas read it back."""

from __future__ import annotations

import time
from collections.abc import Callable
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


class NowAndThen:
    """Seconds of round trips or exchanges, every third of them much longer: the process was stopped."""

    def __init__(self, usual_s: float, stopped_s: float) -> None:
        self.usual_s, self.stopped_s, self.calls = usual_s, stopped_s, 0

    def __call__(self, *arguments: object) -> float:
        self.calls += 1
        return self.usual_s if self.calls % 3 else self.stopped_s


def other_end_s(seconds: float) -> Callable[[torch.Tensor, object], None]:
    """An all-reduce with an end that has so many seconds, of which the lesser stay."""
    return lambda tensor, operation: tensor.clamp_(max=seconds)  # type: ignore[return-value]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One end of a link without the other: round trips of 200 us, exchanges that take 90 us of a processor,
    and 9 ms and 5 ms where the process was stopped.
    """
    monkeypatch.setattr(link_speed, "_round_trip", NowAndThen(2e-4, 9e-3))
    monkeypatch.setattr(link_speed, "_exchange", NowAndThen(9e-5, 5e-3))
    monkeypatch.setattr(link_speed.dist, "broadcast", lambda tensor, source: None)
    monkeypatch.setattr(link_speed.dist, "all_reduce", other_end_s(1.0))
    return monkeypatch


def test_a_process_that_is_stopped_now_and_then_does_not_change_a_message(alone: pytest.MonkeyPatch) -> None:
    way = link_speed._one_way(0, 1, torch.device("cpu"))
    assert way == OneWay(pytest.approx(1e-4), pytest.approx(45e-6))
    # As many as 0.12 s have of the faster of two, at most; beside each exchange 1 ms is computed.
    assert (link_speed._round_trip.calls, link_speed._exchange.calls) == (2 + 200, 120)  # type: ignore[attr-defined]


def test_messages_of_one_size_are_sent_for_no_longer_than_is_asked(alone: pytest.MonkeyPatch) -> None:
    way = link_speed._one_way(0, 1, torch.device("cpu"), 0.02)
    assert way == OneWay(pytest.approx(1e-4), pytest.approx(45e-6))
    assert (link_speed._round_trip.calls, link_speed._exchange.calls) == (2 + 100, 20)  # type: ignore[attr-defined]


def test_of_the_ends_of_a_link_the_one_counts_that_spun_less(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(link_speed.dist, "all_reduce", other_end_s(30e-6))
    assert link_speed._one_way(0, 1, torch.device("cpu")).processor_s == pytest.approx(30e-6)


def test_a_message_takes_no_more_of_a_processor_than_it_is_under_way(alone: pytest.MonkeyPatch) -> None:
    """Both ends spun all the time: 1 ms of each, of messages that are there after 100 us."""
    alone.setattr(link_speed, "_exchange", NowAndThen(2e-3, 5e-3))
    assert link_speed._one_way(0, 1, torch.device("cpu")) == OneWay(pytest.approx(1e-4), pytest.approx(1e-4))


def test_work_beside_a_message_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """50 ms that the process computes while a message is under way, whose calls take a hundredth. Threads
    that earlier tests have left may take more.
    """

    class Arrived:
        def wait(self) -> None: ...

    monkeypatch.setattr(link_speed.dist, "P2POp", lambda *arguments: arguments)
    monkeypatch.setattr(
        link_speed.dist, "batch_isend_irecv", lambda operations: [Arrived() for _ in operations]
    )
    beside = link_speed.values_beside()
    began_s = time.thread_time()
    taken_s = min(link_speed._exchange(0, torch.ones(1), beside, 0.05) for _ in range(3))
    assert time.thread_time() - began_s >= 0.15
    assert 0.0 <= taken_s < 0.04


def test_the_processor_s_time_is_of_a_message_and_of_its_bytes() -> None:
    """20 us for each message and 1 s for each 2 GB."""
    larger = {size: OneWay(1e-3, 20e-6 + size * 4 / 2e9) for size in CURVE_ELEMENTS}
    measured = as_measured(OneWay(1e-4, 20e-6), larger)
    assert measured.message_processor_s == 20e-6
    assert measured.processor_s_per_byte == pytest.approx(1 / 2e9)
    idle = as_measured(OneWay(1e-4, 20e-6), {size: OneWay(1e-3, 10e-6) for size in CURVE_ELEMENTS})
    assert idle.processor_s_per_byte == 0.0, "noise makes no negative time"
