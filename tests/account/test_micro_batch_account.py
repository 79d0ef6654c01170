"""Micro-batches in the account: which samples, which edges, what they take of memory and of time."""

from __future__ import annotations

import pytest

from helpers.cut import cuttable, shares_of
from helpers.plans import cluster_of, metaop_of, profile_of, slice_of
from spindle_cli.account.activations import Layout, edges_between, route, slice_layouts
from spindle_cli.account.device_memory import device_memory, memory_within
from spindle_cli.costs.shares import share_seconds, times_of
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import MetaOpProfile, OpMemory
from spindle_cli.units import MIB


def of_micro_batch(
    metaop: MetaOpProfile,
    number: int,
    count: int,
    times: tuple[float, float, float, float],
    devices: tuple[int, ...] = (0,),
) -> Slice:
    keys = ("start_s", "end_s", "backward_start_s", "backward_end_s")
    update = {"micro_batch": number, "micro_batches": count, **dict(zip(keys, times, strict=True))}
    return slice_of(metaop, (0, metaop.num_ops), devices, 0.0).model_copy(update=update)


def test_shares_of_a_micro_batch_are_samples_of_the_whole_batch() -> None:
    """10 samples in two micro-batches of two shares: 5 are cut into 2 and 3."""
    layouts = [Layout((0, 1), 2, 1, 10, micro_batch=(number, 2)) for number in (0, 1)]
    assert [layout.samples for layout in layouts] == [(0, 5), (5, 10)]
    assert [[layout.rows(share) for share in (0, 1)] for layout in layouts] == [
        [(0, 2), (2, 5)],
        [(5, 7), (7, 10)],
    ]
    assert list(layouts[1].overlaps(6, 9)) == [(0, 6, 7), (1, 7, 9)]
    assert list(layouts[1].overlaps(7, 10)) == [(1, 7, 10)]
    assert layouts[1].holds(1, 7, 10)
    assert not layouts[1].holds(0, 7, 8)
    assert Layout((0,), 1, 1, 10).is_shared is False
    assert Layout((0,), 1, 1, 10, micro_batch=(1, 2)).is_shared is True


def test_rows_move_inside_of_a_micro_batch() -> None:
    """The third of four micro-batches of 16: samples 8 to 12, from two devices to one."""
    source, target = Layout((0, 1), 2, 1, 16, micro_batch=(2, 4)), Layout((2,), 1, 1, 16, micro_batch=(2, 4))
    assert route(source, target) == ((2, 8, 10, 0), (2, 10, 12, 1))
    assert route(target, source) == ((0, 8, 10, 2), (1, 10, 12, 2))


def test_slices_take_from_those_of_their_micro_batch_alone() -> None:
    first, second = metaop_of("t/a", 1, {1: 1.0}), metaop_of("t/b", 1, {1: 1.0}, inputs=("t/a",))
    times = (0.0, 1.0, 2.0, 3.0)
    slices = [of_micro_batch(metaop, number, 2, times) for metaop in (second, first) for number in (1, 0)]
    edges = edges_between(slices, {"t/a": first, "t/b": second})
    assert [(edge.producer, edge.consumer) for edge in edges] == [(2, 0), (3, 1)]


def test_layouts_of_a_plan_know_their_micro_batch() -> None:
    metaop = metaop_of("t/a", 1, {2: 1.0})
    slices = [of_micro_batch(metaop, number, 2, (0, 1, 2, 3), (0, 1)) for number in (0, 1)]

    class Placed:
        by_name = {"t/a": metaop}  # noqa: RUF012 - read alone

    placed = Placed()
    placed.slices = slices  # type: ignore[attr-defined]
    assert [layout.rows_of(1) for layout in slice_layouts(placed)] == [(2, 4), (6, 8)]  # type: ignore[arg-type]


def held(metaop: MetaOpProfile, *slices: Slice) -> float:
    """MiB of activations on the one device, without what the allocator wastes."""
    (need,) = device_memory([metaop], slices, cluster_of(1), profile_of(metaop))
    return round(need.parts["activations"] / MIB)


def test_a_device_keeps_what_its_micro_batches_under_way_keep() -> None:
    """A batch keeps 300 MiB, a third of it 100; with fields of 30 MiB, which are there all the time."""
    memory = OpMemory(
        kept_bytes=(0, 300 * MIB),
        forward_bytes=(0, 300 * MIB),
        backward_bytes=(0, 0),
        first_backward_bytes=(0, 0),
    )
    metaop = metaop_of("t/a", 1, {1: 1.0}, batch_size=9, memory=(memory,), field_bytes={0: 30 * MIB})
    metaop = metaop.model_copy(update={"output_bytes": 0})
    assert held(metaop, slice_of(metaop, (0, 1), (0,), 0.0)) == 330
    one_by_one = [of_micro_batch(metaop, n, 3, (2.0 * n, 2 * n + 1, 2 * n + 1, 2 * n + 2)) for n in range(3)]
    assert held(metaop, *one_by_one) == 130
    at_once = [of_micro_batch(metaop, n, 3, (n, n + 1.0, 5.0 - n, 6.0 - n)) for n in range(3)]
    assert held(metaop, *at_once) == 330
    two = [*at_once[:2], of_micro_batch(metaop, 2, 3, (6.0, 7.0, 7.0, 8.0))]
    assert held(metaop, *two) == 230


def test_a_share_takes_what_the_profile_says_and_linearly_between_but_nothing_beyond() -> None:
    shares = (*shares_of({2: 0.5, 6: 0.9}), *shares_of({4: 0.3}, tp=2))
    shares = tuple(sorted(shares, key=lambda share: (share.samples, share.tp)))

    def op_s(samples: float, tp: int = 1) -> float | None:
        found = share_seconds(shares, samples, tp)
        return None if found is None else found.forward_s + found.backward_s

    assert op_s(2) == pytest.approx(0.5)
    assert op_s(6) == pytest.approx(0.9)
    assert op_s(3) == pytest.approx(0.6)
    assert op_s(5) == pytest.approx(0.8)
    assert (op_s(1), op_s(7)) == (None, None)
    assert (op_s(4, 2), op_s(3, 2), op_s(4, 4)) == (pytest.approx(0.3), None, None)


def test_slices_of_micro_batches_go_by_shares_and_others_by_the_curve() -> None:
    metaop = cuttable("t/a", 1, {8: 2.0, 4: 1.2, 2: 0.7})
    whole = slice_of(metaop, (0, 1), (0, 1), 0.0)
    part = of_micro_batch(metaop, 1, 2, (0, 1, 2, 3), (0, 1))  # 2 samples a device
    assert times_of(metaop, whole, cluster_of(4)) == pytest.approx((0.4, 0.8, 0.0))
    assert times_of(metaop, part, cluster_of(4)) == pytest.approx((0.7 / 3, 1.4 / 3, 0.0))
    assert times_of(metaop.model_copy(update={"curve": ()}), whole, cluster_of(4)) is None
    assert times_of(metaop.model_copy(update={"shares": ()}), part, cluster_of(4)) is None


def test_memory_within_capacities_is_the_same_and_a_byte_less_is_too_little() -> None:
    """Device 1 runs a slice more than device 0, and needs more."""
    first, second = metaop_of("t/a", 1, {2: 1.0}), metaop_of("t/b", 1, {1: 1.0}, inputs=("t/a",))
    slices = [slice_of(first, (0, 1), (0, 1), 0.0), slice_of(second, (0, 1), (1,), 1.0)]
    metaops, cluster, profile = (first, second), cluster_of(3), profile_of(first, second)
    needs = device_memory(metaops, slices, cluster, profile)
    exact = [need.total_bytes for need in needs]
    assert exact[1] > exact[0] > exact[2]
    assert memory_within(metaops, slices, cluster, profile, exact) == needs
    for device in (0, 1):
        less = [size - (each == device) for each, size in enumerate(exact)]
        assert memory_within(metaops, slices, cluster, profile, less) is None
