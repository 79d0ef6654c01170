"""The clock that orders what a program communicates, in ticks: n passes have n ticks to the nanosecond."""

from __future__ import annotations

import pytest

from helpers.clocks import clock_of, clocks_of
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import CurvePoint
from spindle_cli.program.clock import PassClock
from spindle_cli.program.types import Kind


def pass_s(clock: PassClock, kind: Kind, piece: int) -> float:
    """Seconds of a pass, to the nanosecond; both slices' passes are four."""
    start, end = clock.when[kind, piece]
    return round((end - start) / len(clock.when) / 1e9, 9)


PASSES = [(Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.BACKWARD, 1), (Kind.BACKWARD, 0)]


def test_a_pass_starts_when_what_it_takes_has_come() -> None:
    """Forward 0.1 and 0.6 s, backward 0.2 and 0.2 s, a second and 10 us each way between them."""
    clock = clock_of(two_slices(0.3, 0.1, output_bytes=5_000_000_000))
    starts = [clock.start(each) / len(clock.when) / 1e9 for each in PASSES]
    assert starts == pytest.approx([0.0, 1.10001, 1.70001, 2.90002], abs=1e-8)


def test_what_is_posted_later_is_sent_later() -> None:
    clocks = clocks_of(two_slices(0.3, 0.1, output_bytes=5_000_000_000))
    there, back = (PASSES[0], PASSES[1]), (PASSES[2], PASSES[3])
    for posted_s, taken_s in ((0.05, 1.10001), (0.1, 1.10001), (0.5, 1.50001)):
        clock = clocks.clock(posted={there: round(posted_s * 4e9), back: 0})
        assert clock.start(PASSES[1]) / 4e9 == pytest.approx(taken_s, abs=1e-8)


def test_a_pass_that_waits_for_parameters_runs_forward_no_earlier_than_these_are_there() -> None:
    """Forward 0.1 and 0.3 s, backward 0.2 and 0.1."""
    clocks = clocks_of(two_slices(0.3, 0.1, length_s=0.4))

    def starts_s(not_before: dict[int, float]) -> list[float]:
        clock = clocks.clock({piece: int(there_s * 4e9) for piece, there_s in not_before.items()})
        order = [(kind, piece) for kind in (Kind.FORWARD, Kind.BACKWARD) for piece in (0, 1)]
        return [round(clock.start(each) / 4e9, 6) for each in order]

    assert starts_s({}) == [0.0, 0.1, 0.5, 0.4]
    assert starts_s({1: 0.05}) == [0.0, 0.1, 0.5, 0.4]
    assert starts_s({1: 0.25}) == [0.0, 0.25, 0.65, 0.55]
    assert starts_s({0: 1.0, 1: 0.25}) == [1.0, 1.1, 1.5, 1.4]


def test_a_clock_knows_its_first_backward_pass_and_its_end() -> None:
    times = {(Kind.FORWARD, 0): (0, 4), (Kind.BACKWARD, 0): (7, 9), (Kind.FORWARD, 1): (1, 5)}
    clock = PassClock({**times, (Kind.BACKWARD, 1): (6, 8)}, forward_ended=5)
    assert (clock.backward_began, clock.ended) == (6, 9)


def test_what_goes_in_several_chunks_has_come_with_the_longest() -> None:
    """A maker on device 0 of node 0, takers on 1 (the same node) and 2: 5 GB/s and 10 us, 1 and 20."""
    maker, taker = metaop_of("a/m", 1, {1: 0.3}), metaop_of("a/t", 1, {2: 1.0}, inputs=("a/m",))
    maker = maker.model_copy(update={"output_bytes": 8_000_000})
    waves = [[slice_of(maker, (0, 1), (0,), 0.0)], [slice_of(taker, (0, 1), (1, 2), 0.3)]]
    clock = clock_of(plan_of(profile_of(maker, taker), cluster_of(4, devices_per_node=2), waves))
    for made, taken in (PASSES[:2], PASSES[2:]):
        assert (clock.start(taken) - clock.end(made)) / 4e9 == pytest.approx(0.00402, abs=1e-8)


@pytest.mark.parametrize(("second", "after_s"), [(3, 2 * 0.01002), (1, 0.00201)])
def test_what_goes_through_the_same_card_comes_one_after_the_other(second: int, after_s: float) -> None:
    """A maker on device 0 hands 10 MB to two takers, at 1 GB/s between nodes of two devices, or what the
    second takes stays inside of the node, at 5 GB/s.
    """
    maker = metaop_of("a/m", 1, {1: 0.3}).model_copy(update={"output_bytes": 10_000_000})
    takers = [metaop_of(f"a/{name}", 1, {1: 1.0}, inputs=("a/m",)) for name in "tu"]
    placed = [
        slice_of(taker, (0, 1), (device,), 0.3) for taker, device in zip(takers, (2, second), strict=True)
    ]
    waves = [[slice_of(maker, (0, 1), (0,), 0.0)], placed]
    clock = clock_of(plan_of(profile_of(maker, *takers), cluster_of(4, devices_per_node=2), waves))
    made = clock.end(PASSES[0])
    starts = [clock.start((Kind.FORWARD, piece)) for piece in (1, 2)]
    waited_s = [(start - made) / len(clock.when) / 1e9 for start in starts]
    assert waited_s == pytest.approx([0.01002, after_s], abs=1e-8)


def two_slices(
    forward_s: float,
    backward_s: float,
    *,
    recompute: bool = False,
    length_s: float | None = None,
    output_bytes: int = 0,
) -> Plan:
    """A maker on device 0 and a taker on device 1, which lasts `length_s`, or twice what its curve says."""
    point = CurvePoint(num_devices=1, dp=1, forward_s=forward_s, backward_s=backward_s, source="measured")
    maker, taker = metaop_of("a/m", 1, {1: 0.3}), metaop_of("a/t", 1, {1: 1.0}, inputs=("a/m",))
    maker = maker.model_copy(update={"output_bytes": output_bytes})
    taker = taker.model_copy(update={"curve": (point,)})
    second = slice_of(taker, (0, 1), (1,), 0.3, recompute=recompute)
    length_s = 2 * (second.end_s - second.start_s) if length_s is None else length_s
    longer = second.model_copy(update={"end_s": second.start_s + length_s})
    return plan_of(profile_of(maker, taker), cluster_of(2), [[slice_of(maker, (0, 1), (0,), 0.0)], [longer]])


@pytest.mark.parametrize(("forward_s", "backward_s"), [(0.3, 0.1), (0.25, 0.25), (2.0, 1.0)])
def test_a_slice_s_length_is_shared_between_its_passes_as_on_its_curve(
    forward_s: float, backward_s: float
) -> None:
    clock = clock_of(two_slices(forward_s, backward_s))
    assert pass_s(clock, Kind.FORWARD, 1) == pytest.approx(2 * forward_s)
    assert pass_s(clock, Kind.BACKWARD, 1) == pytest.approx(2 * backward_s)
    assert pass_s(clock, Kind.FORWARD, 0) == pytest.approx(0.1)


def test_a_slice_that_recomputes_runs_forward_again_in_its_backward_pass() -> None:
    clock = clock_of(two_slices(0.3, 0.1, recompute=True))
    assert pass_s(clock, Kind.FORWARD, 1) == pytest.approx(2 * 0.3)
    assert pass_s(clock, Kind.BACKWARD, 1) == pytest.approx(2 * (0.1 + 0.3))


def test_an_op_without_a_time_takes_a_third_of_its_slice_forward_and_a_nanosecond_at_least() -> None:
    both = (Kind.FORWARD, Kind.BACKWARD)
    assert [pass_s(clock_of(two_slices(0.0, 0.0)), kind, 1) for kind in both] == [1e-9, 1e-9]
    longer = clock_of(two_slices(0.0, 0.0, length_s=0.9))
    assert [pass_s(longer, kind, 1) for kind in both] == pytest.approx([0.3, 0.6])


def test_passes_wait_for_what_they_take_and_no_two_end_together() -> None:
    """Forward 0.1 and 0.5 s, then backward 0.5 s of the taker and 0.2 s of the maker."""
    clock = clock_of(two_slices(0.25, 0.25))
    ends = [clock.when[each][1] for each in ((Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.BACKWARD, 1))]
    starts = [clock.when[each][0] for each in ((Kind.FORWARD, 1), (Kind.BACKWARD, 1), (Kind.BACKWARD, 0))]
    assert starts == ends
    assert clock.forward_ended == ends[1] == pytest.approx(4e9 * 0.6)
    assert clock.end((Kind.BACKWARD, 0)) == pytest.approx(4e9 * 1.3)
    assert len({end % 4 for _, end in clock.when.values()}) == 4


def test_in_version_2_each_pass_is_as_long_as_planned_and_a_nanosecond_at_least() -> None:
    """The taker's curve says 0.25 s each way, its plan 0.5 and 0.2; the maker's 0.1 and 0.2, none and 0.7."""
    data = two_slices(0.25, 0.25).model_dump(mode="json", by_alias=True)
    data["schema"] = "spindle.plan/2"
    keys = ("start_s", "end_s", "backward_start_s", "backward_end_s")
    for wave, times in zip(data["waves"], ((0.0, 0.0, 0.7, 1.4), (0.0, 0.5, 0.5, 0.7)), strict=True):
        wave["slices"][0].update(zip(keys, times, strict=True))
        wave.update(start_s=times[0], end_s=times[1])
    clock = clock_of(Plan.from_data(data, where="test"))
    lengths = [pass_s(clock, kind, piece) for piece in (0, 1) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    assert lengths == pytest.approx([1e-9, 0.7, 0.5, 0.2], rel=1e-6)
