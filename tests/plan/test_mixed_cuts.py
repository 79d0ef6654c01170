"""Batches cut over devices of several types, and their price: by hand, and against every possible cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.several_types import cluster_of_types, metaop_on_types
from spindle_cli.costs.beyond_curve import Again
from spindle_cli.errors import NoPlanError
from spindle_cli.plan.bound.pricing import Pricing
from spindle_cli.plan.cutting.allocations import allocations, groups_of_type, point_of_cut, recomputed
from spindle_cli.plan.cutting.cuts import Cutter, offsets
from spindle_cli.plan.cutting.shares import ShareTimes, share_times
from spindle_cli.plan.strategies.baselines import in_proportion
from spindle_cli.profile.types import MetaOpProfile

TWO = cluster_of_types({"fast": 3, "slow": 3})


def times_of(sample_s: dict[str, float], batch_size: int = 8) -> ShareTimes:
    (times,) = share_times(metaop_on_types("t/net", 1, sample_s, batch_size=batch_size), TWO)
    return times


def all_cuts(batch_size: int, num_shares: int) -> Iterator[tuple[int, ...]]:
    sizes = range(1, batch_size + 1)
    return (cut for cut in product(sizes, repeat=num_shares) if sum(cut) == batch_size)


@pytest.mark.parametrize(
    ("counts", "cut"),
    [
        ((1, 1), (6, 2)),  # 1 s and 3 s a sample: both take 6 s
        ((2, 1), (3, 4, 1)),  # 4 s; (3, 3, 2) would take 6
        ((1, 0), (8,)),
        ((0, 3), (2, 3, 3)),
        ((3, 3), (1, 2, 2, 1, 1, 1)),  # a slow device has a sample at least
    ],
)
def test_shares_are_in_proportion_to_speed_in_whole_samples(
    counts: tuple[int, int], cut: tuple[int, ...]
) -> None:
    assert Cutter(times_of({"fast": 1.0, "slow": 3.0})).cut(counts) == cut


def test_the_slowest_device_has_a_sample_however_long_it_takes() -> None:
    assert Cutter(times_of({"fast": 1.0, "slow": 100.0})).cut((1, 1)) == (7, 1)


def test_no_cut_has_empty_shares_or_sizes_that_are_not_known() -> None:
    cutter = Cutter(times_of({"fast": 1.0, "slow": 3.0}, batch_size=4))
    assert cutter.cut((3, 2)) is None
    assert cutter.cut((0, 0)) is None
    net = metaop_on_types("t/net", 1, {"fast": 1.0, "slow": 3.0})
    some = tuple(share for share in net.shares if share.samples in (2, 4))
    # the curve has shares of 8, 4, 2 and 1 samples, these all between 2 and 4: 5, 6 and 7 are not known
    (times,) = share_times(net.model_copy(update={"shares": some}), TWO)
    assert Cutter(times).cut((1, 1)) is None
    assert Cutter(times).cut((2, 1)) == (3, 4, 1)


def test_what_there_is_room_for_too_much_is_taken_from_the_longest_shares() -> None:
    """7 samples: within 5 s the fast one does 4, in 4.4 s, and each slow one 2, which take 5 s."""
    cutter = Cutter(times_of({"fast": 1.1, "slow": 2.5}, batch_size=7))
    assert cutter.cut((1, 2)) == (4, 1, 2)


def test_the_longest_shares_are_left_as_large_as_they_are_known() -> None:
    """6 samples: a slow device takes 10 s for 3 or 4, and its time for fewer is not known; a fast one does
    the rest.
    """
    net = metaop_on_types("t/net", 1, {"fast": 1.0, "slow": 10 / 3}, batch_size=6)
    shares = [share for share in net.shares if share.device == "fast" or share.samples == 3]
    four = shares[-1].model_copy(update={"samples": 4})
    curve = tuple(point for point in net.curve if point.device == "fast")
    (times,) = share_times(net.model_copy(update={"shares": (*shares, four), "curve": curve}), TWO)
    assert Cutter(times).cut((1, 1)) == (3, 3)


@given(
    st.lists(st.integers(1, 40), min_size=7, max_size=7),
    st.lists(st.integers(1, 40), min_size=7, max_size=7),
    st.tuples(st.integers(0, 2), st.integers(0, 2)).filter(any),
)
@examples(60)
def test_no_cut_is_faster_where_larger_shares_take_longer(
    fast: list[int], slow: list[int], counts: tuple[int, int]
) -> None:
    net = metaop_on_types("t/net", 1, {"fast": 1.0, "slow": 1.0}, batch_size=7)
    seconds = {"fast": sorted(fast), "slow": sorted(slow)}
    shares = tuple(
        share.model_copy(
            update={"forward_s": 0.0, "backward_s": float(seconds[share.device or ""][share.samples - 1])}
        )
        for share in net.shares
    )
    (times,) = share_times(net.model_copy(update={"shares": shares}), TWO)
    kinds = ["fast"] * counts[0] + ["slow"] * counts[1]
    cut = Cutter(times).cut(counts)

    def longest_s(samples: Sequence[int]) -> float:
        return max(seconds[kind][size - 1] for kind, size in zip(kinds, samples, strict=True))

    assert cut is not None
    assert sum(cut) == 7
    assert longest_s(cut) == min(map(longest_s, all_cuts(7, len(kinds))))


def test_rows_are_the_borders_of_shares_that_differ() -> None:
    assert offsets((3, 4, 1)) == (0, 3, 7, 8)
    assert offsets((4, 4)) is None
    assert offsets((8,)) is None


def test_an_allocation_takes_as_long_as_its_longest_share_forward_and_backward() -> None:
    """Shares of 6 samples at 1 s and 2 at 4 s: 2 + 4 s and 8/3 + 16/3 s."""
    times = times_of({"fast": 1.0, "slow": 4.0})
    point = point_of_cut(times, (1, 1), (6, 2))
    assert point is not None
    assert (point.forward_s, point.backward_s) == (pytest.approx(8 / 3), pytest.approx(16 / 3))
    assert (point.counts, point.rows, point.dp, point.num_devices) == ((1, 1), (0, 6, 8), 2, 2)
    few = metaop_on_types("t/net", 1, {"fast": 1.0, "slow": 4.0})
    few = few.model_copy(update={"shares": few.shares[:7], "curve": few.curve[:1]})
    (known,) = share_times(few, cluster_of_types({"fast": 1}))
    assert point_of_cut(known, (1,), (7,)) is not None
    assert point_of_cut(share_times(few, TWO)[0], (0, 1), (8,)) is None


def test_only_allocations_that_none_with_fewer_devices_beats_are_kept() -> None:
    """At 1 s and 100 s a sample a slow device never helps a fast one; alone it is still an allocation."""
    net = metaop_on_types("t/net", 1, {"fast": 1.0, "slow": 100.0})
    points = allocations(net, TWO)
    assert [(point.counts, point.op_s) for point in points] == [
        ((0, 1), pytest.approx(800.0)),
        ((0, 2), pytest.approx(400.0)),
        ((0, 3), pytest.approx(300.0)),
        ((1, 0), pytest.approx(8.0)),
        ((2, 0), pytest.approx(4.0)),
        ((3, 0), pytest.approx(3.0)),
    ]


def test_groups_of_tensor_parallelism_are_of_one_type_and_node() -> None:
    net = metaop_on_types("t/net", 1, {"fast": 1.0, "slow": 2.0})
    halves = tuple(
        share.model_copy(
            update={"tp": 2, "forward_s": share.forward_s / 2, "backward_s": share.backward_s / 2}
        )
        for share in net.shares
    )
    wide = net.model_copy(update={"shares": (*net.shares, *halves)})
    points = [point for point in allocations(wide, TWO) if point.tp == 2]
    # three devices of each node have room for one group of two
    assert {point.counts for point in points} <= {(2, 0), (0, 2), (2, 2)}


def test_a_metaop_without_room_has_no_plan() -> None:
    net = metaop_on_types("t/net", 1, {"fast": 1.0, "slow": 2.0})
    wide = net.model_copy(
        update={
            "shares": (),
            "curve": tuple(
                p.model_copy(update={"tp": 4, "num_devices": 4 * p.dp}) for p in net.curve if p.dp == 1
            ),
        }
    )
    with pytest.raises(NoPlanError, match=r"t/net: it has no allocation .* fast, slow"):
        allocations(wide, TWO)


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [
        (8, (1, 1), (4, 4)),
        (9, (1, 1), (4, 5)),
        (10, (3, 1), (7, 3)),
        (3, (100, 1, 1), (1, 1, 1)),
        (12, (2, 1, 1), (5, 3, 4)),
    ],
)
def test_shares_by_weight_are_whole_and_never_empty(
    total: int, weights: tuple[int, ...], shares: tuple[int, ...]
) -> None:
    assert in_proportion(total, [Fraction(weight) for weight in weights]) == shares


def cost(op_s: float, counts: Sequence[float], prices: Sequence[float], flow: float) -> float:
    return op_s * (sum(map(lambda price, count: price * count, prices, counts)) + flow)


def test_the_cheapest_allocation_by_hand() -> None:
    """Samples take 1 s and 3 s. If fast devices cost 1 and slow ones 0.1, eight samples are cheapest on the
    slow ones, 24 device-seconds at 0.1; if a second of the op costs 1 as well, three fast ones are, in 3 s.
    """
    pricing = Pricing(times_of({"fast": 1.0, "slow": 3.0}), [3, 3])
    column = pricing.cheapest((1.0, 0.1), 0.0)
    assert column is not None
    assert column.cost((1.0, 0.1), 0.0) == pytest.approx(2.4)
    assert column.counts[0] == 0
    column = pricing.cheapest((0.01, 0.01), 1.0)
    assert column is not None
    assert column == (pytest.approx(3.0), (3.0, 0.0))


@given(
    st.tuples(st.floats(0.1, 5), st.floats(0.1, 5)),
    st.tuples(st.floats(0, 2), st.floats(0, 2)),
    st.floats(0, 2),
)
@examples(40)
def test_no_cut_is_cheaper_than_the_cheapest_allocation(
    sample_s: tuple[float, float], prices: tuple[float, float], flow: float
) -> None:
    times = times_of(dict(zip(("fast", "slow"), sample_s, strict=True)), batch_size=6)
    column = Pricing(times, [2, 2]).cheapest(prices, flow)
    assert column is not None
    for counts in product(range(3), repeat=2):
        kinds = [number for number, count in enumerate(counts) for _ in range(count)]
        for cut in all_cuts(6, len(kinds)) if kinds else ():
            op_s = max(sample_s[kind] * size for kind, size in zip(kinds, cut, strict=True))
            assert column.cost(prices, flow) <= cost(op_s, counts, prices, flow) * (1 + 1e-9)


@given(st.lists(st.floats(0.1, 5), min_size=3, max_size=3), st.lists(st.floats(0, 2), min_size=3, max_size=3))
@examples(20)
def test_of_three_types_the_price_is_never_above_that_of_a_cut(
    sample_s: list[float], prices: list[float]
) -> None:
    three = cluster_of_types({"a": 1, "b": 1, "c": 1})
    net: MetaOpProfile = metaop_on_types(
        "t/net", 1, dict(zip(three.types, sample_s, strict=True)), batch_size=5
    )
    (times,) = share_times(net, three)
    column = Pricing(times, [1, 1, 1]).cheapest(prices, 0.5)
    assert column is not None
    for counts in product(range(2), repeat=3):
        kinds = [number for number, count in enumerate(counts) if count]
        for cut in all_cuts(5, len(kinds)) if kinds else ():
            op_s = max(sample_s[kind] * size for kind, size in zip(kinds, cut, strict=True))
            assert column.cost(prices, 0.5) <= cost(op_s, counts, prices, 0.5) * (1 + 1e-9)


def test_times_are_bounded_from_both_sides_where_a_larger_share_is_faster() -> None:
    net = metaop_on_types("t/net", 1, {"fast": 1.0, "slow": 1.0}, batch_size=3)
    seconds = {1: 3.0, 2: 2.0, 3: 5.0}
    shares = tuple(
        share.model_copy(update={"forward_s": 0.0, "backward_s": seconds[share.samples]})
        for share in net.shares
    )
    (times,) = share_times(net.model_copy(update={"shares": shares}), TWO)
    assert times.of_types[0].at_most_s[1:].tolist() == [3.0, 3.0, 5.0]
    assert times.of_types[0].at_least_s[1:].tolist() == [2.0, 2.0, 5.0]
    assert Cutter(times).cut((1, 1)) == (1, 2)  # 3 s


def test_recomputing_runs_forward_once_more() -> None:
    net = metaop_on_types("t/net", 1, {"fast": 3.0, "slow": 6.0}, batch_size=2)
    (times,) = share_times(net, TWO, forwards=2)
    assert times.of_types[0].op_s[1:].tolist() == pytest.approx([4.0, 8.0])  # 1 + 2 s a sample, and 1 again
    (again,) = recomputed(allocations(net, TWO)[-1:], net, Again.ALL)
    assert (again.forward_s, again.backward_s, again.op_s) == pytest.approx((1.0, 3.0, 4.0))
    assert again.recompute


def test_groups_are_of_whole_nodes() -> None:
    """Two nodes of three devices have room for one group of two each."""
    cluster = cluster_of_types({"fast": 6, "slow": 3}, devices_per_node=3)
    assert [groups_of_type(cluster, "fast", tp) for tp in (1, 2, 3, 4)] == [6, 2, 2, 0]
    assert groups_of_type(cluster, "slow", 2) == 1


def test_a_group_is_priced_by_all_of_its_devices() -> None:
    """Two devices that hold a share together take 4 s for all samples: 8 device-seconds."""
    times = times_of({"fast": 0.5, "slow": 5.0})
    column = Pricing(replace(times, tp=2), [1, 1]).cheapest((1.0, 1.0), 0.0)
    assert column == (pytest.approx(4.0), (2.0, 0.0))
    assert column is not None
    assert column.cost((1.0, 1.0), 0.5) == pytest.approx(4.0 * 2.5)
