"""Shares of unequal size in the account: which samples, what moves, what they take of memory and of time."""

from __future__ import annotations

import pytest

from helpers.cut import cuttable, shares_of
from helpers.plans import cluster_of, metaop_of, profile_of, slice_of
from spindle_cli.account.activations import Chunk, Crossings, Layout, crossing, layout_of, route
from spindle_cli.account.compute import processor_overhead
from spindle_cli.account.device_memory import device_memory, memory_by_pass
from spindle_cli.costs.beyond_curve import batch_sums_s, sums_beyond_curve_s
from spindle_cli.costs.shares import cuts_by_share, cuts_like_largest, largest_samples, times_of
from spindle_cli.plan.types import Slice
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.types import MetaOpProfile, OpMemory, ProcessorCosts
from spindle_cli.units import MIB

FOUR = cluster_of(4)


def by_rows(metaop: MetaOpProfile, rows: tuple[int, ...], devices: tuple[int, ...], tp: int = 1) -> Slice:
    """All ops, for a second."""
    whole = slice_of(metaop, (0, metaop.num_ops), (0,), 0.0)
    return whole.model_copy(update={"rows": rows, "devices": devices, "dp": len(rows) - 1, "tp": tp})


def test_shares_are_counted_from_the_beginning_of_the_micro_batch() -> None:
    """The second half of 24 samples, of which 7, 1 and 4 are shares, each of two devices."""
    layout = Layout((0, 1, 2, 3, 4, 5), 3, 2, 24, micro_batch=(1, 2), offsets=(0, 7, 8, 12))
    assert [layout.rows(share) for share in range(3)] == [(12, 19), (19, 20), (20, 24)]
    assert [layout.rows_of(device) for device in (1, 2, 5)] == [(12, 19), (19, 20), (20, 24)]
    assert layout.holds(3, 19, 20)
    assert not layout.holds(3, 18, 20)
    assert list(layout.overlaps(18, 21)) == [(0, 18, 19), (1, 19, 20), (2, 20, 21)]
    assert list(layout.overlaps(19, 20)) == [(1, 19, 20)]
    assert list(layout.overlaps(20, 24)) == [(2, 20, 24)]


def test_between_two_cuts_what_overlaps_moves() -> None:
    """8 samples in 5 + 3 on devices 0 and 1, then in 1 + 6 + 1 on 0, 2 and 1."""
    source, target = (
        Layout((0, 1), 2, 1, 8, offsets=(0, 5, 8)),
        Layout((0, 2, 1), 3, 1, 8, offsets=(0, 1, 7, 8)),
    )
    assert route(source, target) == (
        Chunk(destination=0, first=0, last=1, source=0),
        Chunk(destination=1, first=7, last=8, source=1),
        Chunk(destination=2, first=1, last=5, source=0),
        Chunk(destination=2, first=5, last=7, source=1),
    )
    assert sorted(crossing(target, source)) == [(0, 1, 5, 2), (1, 5, 7, 2)]


def test_the_same_devices_in_other_shares_are_another_layout() -> None:
    """Of 8 samples the fourth moves."""
    equal, other = Layout((0, 1), 2, 1, 8), Layout((0, 1), 2, 1, 8, offsets=(0, 3, 8))
    assert crossing(equal, other) == [(1, 3, 4, 0)]
    assert crossing(other, equal) == [(0, 3, 4, 1)]


def test_a_slice_says_how_large_its_shares_are() -> None:
    metaop = metaop_of("t/a", 1, {1: 1.0})
    piece = by_rows(metaop, (0, 5, 7, 8), (0, 1, 2))
    assert list(cuts_by_share(piece)) == [8 / 5, 4.0, 8.0]
    assert (cuts_like_largest(piece), largest_samples(piece, 8)) == (8 / 5, 5)
    half = by_rows(metaop, (0, 3, 4), (0, 1)).model_copy(update={"micro_batches": 2})
    assert list(cuts_by_share(half)) == [8 / 3, 8.0]
    assert layout_of(half.model_copy(update={"micro_batch": 1}), {"t/a": metaop}).rows_of(1) == (7, 8)
    equal = slice_of(metaop_of("t/a", 1, {2: 1.0}), (0, 1), (0, 1), 0.0)
    assert (list(cuts_by_share(equal)), cuts_like_largest(equal), largest_samples(equal, 8)) == ([2, 2], 2, 4)


def test_a_pass_takes_as_long_as_its_largest_share_wherever_that_is() -> None:
    """2 s for 8 samples and 1.2 s for 4: 1.6 s for 6, a third of it forward; nothing is known below 4."""
    metaop = cuttable("t/a", 1, {8: 2.0, 4: 1.2})
    for rows in ((0, 6, 8), (0, 2, 8), (0, 1, 7, 8)):
        devices = tuple(range(len(rows) - 1))
        assert times_of(metaop, by_rows(metaop, rows, devices), FOUR) == pytest.approx(
            (1.6 / 3, 3.2 / 3, 0.0)
        )
    assert times_of(metaop, by_rows(metaop, (0, 3, 6, 8), (0, 1, 2)), FOUR) is None
    split = metaop.model_copy(update={"shares": (*shares_of({6: 0.9}, tp=2),)})
    assert times_of(split, by_rows(split, (0, 6, 8), (0, 1, 2, 3), tp=2), FOUR) == pytest.approx(
        (0.3, 0.6, 0.0)
    )


def test_the_largest_share_is_exactly_the_last_one_known() -> None:
    """49 samples are one share of 49 that is known, though 49 / (49 / 47) is less than 47 in floats."""
    metaop = cuttable("t/a", 1, {49: 2.0}).model_copy(update={"shares": shares_of({47: 1.5})})
    assert times_of(metaop, by_rows(metaop, (0, 47, 49), (0, 1)), FOUR) == pytest.approx((0.5, 1.0, 0.0))


def kept(num_mib: int) -> OpMemory:
    """An op that keeps so many MiB for the whole batch, and nothing else."""
    none = (0, 0)
    return OpMemory(
        kept_bytes=(0, num_mib * MIB), forward_bytes=none, backward_bytes=none, first_backward_bytes=none
    )


def test_each_device_keeps_what_its_own_share_takes() -> None:
    """300 MiB for 8 samples, with 80 MiB of fields: 6, 1 and 1 of them."""
    metaop = metaop_of("t/a", 1, {1: 1.0}, memory=(kept(300),), field_bytes={0: 80 * MIB})
    metaop = metaop.model_copy(update={"output_bytes": 0})
    piece = by_rows(metaop, (0, 6, 7, 8), (2, 0, 1))
    needs = device_memory([metaop], [piece], cluster_of(4), profile_of(metaop))
    found = [need.parts["activations"] / MIB for need in needs]
    assert found == pytest.approx([380 / 8, 380 / 8, 380 * 6 / 8, 0.0])
    apart = piece.model_copy(update={"backward_start_s": 1.0, "backward_end_s": 2.0})
    assert device_memory([metaop], [apart], cluster_of(4), profile_of(metaop)) == needs
    by_pass = memory_by_pass([metaop], [apart], cluster_of(4), profile_of(metaop))
    peaks = [max(most for most, _ in each.passes.values()) for each in by_pass[:3]]
    assert peaks == [need.total_bytes for need in needs[:3]]


def test_devices_that_share_two_slices_hold_their_shares_of_both() -> None:
    """100 MiB of the one, 200 of the other, in 6 + 2 and in 3 + 5 samples."""
    one, two = (
        metaop_of(f"t/{name}", 1, {1: 1.0}, memory=(kept(size),)).model_copy(update={"output_bytes": 0})
        for name, size in (("a", 100), ("b", 200))
    )
    slices = [
        by_rows(one, (0, 6, 8), (0, 1)),
        by_rows(two, (0, 3, 8), (0, 1)).model_copy(update={"start_s": 1.0, "end_s": 2.0}),
    ]
    needs = device_memory([one, two], slices, cluster_of(2), profile_of(one, two))
    found = [need.parts["activations"] / MIB for need in needs]
    assert found == pytest.approx([75 + 75, 25 + 125])


def handing(name: str, *inputs: str) -> MetaOpProfile:
    """A MetaOp that hands on 8 MiB, one for each sample."""
    return metaop_of(name, 1, {1: 1.0}, inputs=inputs).model_copy(update={"output_bytes": 8 * MIB})


def test_devices_receive_what_they_do_not_hold_and_sum_their_own_share() -> None:
    """5 + 3 samples; taken as 5 + 3 there, as 4 + 4 there, where the second device lacks a sample of its own
    and takes all of them, and by device 2 alone.
    """
    made = handing("a/made")
    same, other, alone = (handing(name, "a/made") for name in ("a/same", "a/other", "a/alone"))
    slices = [
        by_rows(made, (0, 5, 8), (0, 1)),
        by_rows(same, (0, 5, 8), (0, 1)),
        slice_of(other, (0, 1), (0,), 1.0).model_copy(update={"devices": (0, 1), "dp": 2}),
        slice_of(alone, (0, 1), (2,), 1.0),
    ]
    crossings = Crossings(slices, {each.name: each for each in (made, same, other, alone)})
    assert crossings.received_by(1) is None
    assert crossings.received_by(2) == [0.0, 4 * MIB]
    assert crossings.received_by(3) == [8 * MIB]
    # Of the gradients from `other` device 0 lacks the fifth sample, device 1 nothing; from `alone` both all;
    # and the sum of all three.
    assert crossings.returned_to(0) == [(5 + 5 + 5) * MIB, (3 + 3) * MIB]


def test_a_device_reads_its_own_share() -> None:
    costs = ProcessorCosts(message_s=0.0, s_per_byte=0.0, load_s={"t": 0.01})
    net = metaop_of("t/a", 1, {1: 1.0}, field_bytes={0: 1})
    piece = by_rows(net, (0, 5, 8), (0, 1, 2, 3), tp=2)
    beside = processor_overhead(costs, (0,) * 5, [piece], {"t/a": net}, (), ())
    assert beside.seconds == pytest.approx((0.05, 0.05, 0.03, 0.03, 0.0))


def test_of_the_sums_of_unequal_shares_what_the_largest_knows_is_counted_once() -> None:
    """On two devices all of them are in the curve's point; a quarter in the share of 5 samples."""
    sums = (BatchSum(num_bytes=10**6, forward=2, backward=1),)
    net = metaop_of("t/a", 1, {2: 1.0}, batch_sums=sums)
    all_s = batch_sums_s(sums, (0, 1), cluster_of(2))
    curve = (net.curve[0].model_copy(update={"communication_s": sum(all_s)}),)
    (share,) = shares_of({5: 1.2})
    shares = (share.model_copy(update={"communication_s": sum(all_s) / 4}),)
    net = net.model_copy(update={"curve": curve, "shares": shares})
    equal = slice_of(net, (0, 1), (0, 1), 0.0)
    assert sums_beyond_curve_s(equal, net, cluster_of(2)) == pytest.approx((0.0, 0.0))
    uneven = equal.model_copy(update={"rows": (0, 5, 8)})
    three_quarters = [each * 3 / 4 for each in all_s]
    assert sums_beyond_curve_s(uneven, net, cluster_of(2)) == pytest.approx(three_quarters)
