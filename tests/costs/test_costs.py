"""The cost formulas on cases computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.plans import cluster_of
from spindle_cli.costs.links import (
    Spread,
    _Shape,
    all_gather_s,
    all_reduce_s,
    bandwidth_bytes_per_s,
    by_node_s,
    collectives_bytes,
    messages_bytes,
    per_node,
    spread_collective_s,
    transfer_s,
)
from spindle_cli.costs.parameters import update_traffic
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.units import MIB


def gpus(nodes: int, per_node: int, nics: int | None = None) -> Cluster:
    group = NodeGroup(count=nodes, devices=per_node, device="a800-80gb", memory_gib=80, nics=nics)
    return Cluster(
        name="gpus",
        nodes=(group,),
        links=Links(
            intra_node=Link(latency_us=0, bandwidth_gb_per_s=100),
            inter_node=Link(latency_us=0, bandwidth_gb_per_s=10),
        ),
    )


def test_a_message_takes_latency_and_bytes() -> None:
    link = Link(latency_us=10, bandwidth_gb_per_s=2)
    assert transfer_s(4e9, link) == pytest.approx(2.00001)
    assert transfer_s(0, link) == 0.0


def test_bandwidth_follows_the_curve_over_the_logarithm_of_bytes() -> None:
    link = Link(latency_us=0, bandwidth_gb_per_s=9, curve=((10.0, 1.0), (1000.0, 3.0)))
    assert bandwidth_bytes_per_s(1, link) == 1e9
    assert bandwidth_bytes_per_s(100, link) == pytest.approx(2e9)
    assert bandwidth_bytes_per_s(10**6, link) == 3e9


def test_a_ring_moves_its_share_of_the_bytes_twice() -> None:
    """4 devices of one CPU node at 5 GB/s, 10 us: 6 steps of a quarter."""
    assert all_reduce_s(4e9, range(4), cluster_of(4)) == pytest.approx(6 * (10e-6 + 1e9 / 5e9))
    assert all_gather_s(4e9, range(4), cluster_of(4)) == pytest.approx(3 * (10e-6 + 1e9 / 5e9))
    assert all_reduce_s(4e9, [3], cluster_of(4)) == 0.0


def test_a_ring_over_two_cpu_nodes_is_as_slow_as_their_link() -> None:
    cluster = cluster_of(4, devices_per_node=2)
    assert all_reduce_s(4e9, range(4), cluster) == pytest.approx(6 * (15e-6 + 1e9 / 1e9))


def test_every_network_card_carries_a_ring_of_its_own() -> None:
    """2 x 4 devices: 4 rings at 10 GB/s between the nodes, so 40; one device on a node: 10."""
    assert all_gather_s(8e9, range(8), gpus(2, 4)) == pytest.approx(7 / 8 * 8e9 / 40e9)
    assert all_gather_s(8e9, [0, 1, 2, 3, 4], gpus(2, 4)) == pytest.approx(4 / 5 * 8e9 / 10e9)


@pytest.mark.parametrize(("nics", "between_s"), [(1, 0.8), (2, 0.4), (4, 0.2), (8, 0.2), (None, 0.2)])
def test_a_sum_over_nodes_shares_the_cards_that_there_are(nics: int | None, between_s: float) -> None:
    """2 x 4 devices, 8 GB, by a tree of each node that crosses once: all cards together at 10 GB/s each, nine
    tenths of it; a ring would cross with 14 / 8 of the bytes.
    """
    assert all_reduce_s(8e9, range(8), gpus(2, 4, nics)) == pytest.approx(between_s / 0.9)


def test_trees_of_more_than_two_nodes_cross_twice_and_rings_of_large_sums_are_faster() -> None:
    """12 GB over 3 x 4 devices at 10 GB/s: 22 / 12 of them around a ring, 2 through trees at nine tenths. Of
    two nodes, where the links inside are slow: 8 GB through both, up and down, at 4 GB/s.
    """
    assert all_reduce_s(12e9, range(12), gpus(3, 4, 1)) == pytest.approx(22 / 12 * 12e9 / 10e9)
    links = gpus(2, 4).links
    slow = links.model_copy(update={"intra_node": Link(latency_us=0, bandwidth_gb_per_s=4)})
    cluster = gpus(2, 4).model_copy(update={"links": slow})
    assert all_reduce_s(8e9, range(8), cluster) == pytest.approx(14 / 8 * 2)
    assert _Shape(Spread((4, 4)), cluster).tree_s(8e9) == pytest.approx(2 * 8 / 4 / 0.9)


@pytest.mark.parametrize(
    ("num_bytes", "speed"),
    [
        (1, 0.9),
        (64 * 2**7 - 1, 0.9),
        (64 * 2**7, 0.8),
        (64 * 2**8, 0.7),
        (64 * 2**16, 0.5),
        (64 * 2**17, 0.6),
        (64 * 2**21, 0.9),
        (64 * 2**22 - 1, 0.9),
        (64 * 2**22, 1.0),
        (2**40, 1.0),
    ],
)
def test_trees_are_slower_for_messages_of_medium_size(num_bytes: int, speed: float) -> None:
    """3 nodes with a device each: twice the bytes at 10 GB/s, nine tenths of it, of that what NCCL says."""
    expected = 2 * num_bytes / 10e9 / (0.9 * speed)
    assert _Shape(Spread((1, 1, 1)), gpus(3, 2)).tree_s(num_bytes) == pytest.approx(expected)


def test_a_gather_over_nodes_shares_the_cards_that_there_are() -> None:
    """Around all devices, nodes or not: 7 steps of 1 GB at 10 GB/s."""
    assert all_gather_s(8e9, range(8), gpus(2, 4, 1)) == pytest.approx(0.7)


def test_two_devices_of_a_node_use_two_of_its_cards() -> None:
    """Two rings side by side over one device pair of each node: 3 steps of 2 GB at 2 x 10 GB/s."""
    assert all_gather_s(8e9, [0, 1, 4, 5], gpus(2, 4, 3)) == pytest.approx(0.3)
    assert all_gather_s(8e9, [0, 1, 4, 5], gpus(2, 4, 1)) == pytest.approx(0.6)


def test_what_goes_on_side_by_side_shares_the_cards_of_nodes() -> None:
    """4 parts of a layer, on as many devices of each of 4 nodes: over 4 cards each has one, over 1 a quarter,
    over 2 a half. Of one node they share nothing.
    """
    alone, together = Spread((1,) * 4), Spread((1,) * 4, side_by_side=4)
    for nics, slower in ((4, 1), (8, 1), (2, 2), (1, 4)):
        expected = slower * spread_collective_s(10**9, alone, 1, gpus(4, 4, nics))
        assert spread_collective_s(10**9, together, 1, gpus(4, 4, nics)) == pytest.approx(expected)
        assert spread_collective_s(10**10, together, 2, gpus(4, 4, nics)) == pytest.approx(
            slower * spread_collective_s(10**10, alone, 2, gpus(4, 4, nics))
        )
    pairs = Spread((2, 2), side_by_side=2)
    assert spread_collective_s(10**9, pairs, 1, gpus(2, 4, 1)) == pytest.approx(2 * 0.75 / 10)
    assert spread_collective_s(10**9, pairs, 1, gpus(2, 4, 4)) == pytest.approx(0.75 / 20)
    for nics, slower in ((4, 1), (1, 2)):
        by_gloo = gpus(2, 4, nics).model_copy(update={"backend": "gloo"})
        assert spread_collective_s(10**9, pairs, 1, by_gloo) == pytest.approx(slower * 0.75 / 10)
    inside = Spread((4,), side_by_side=2)
    assert spread_collective_s(10**9, inside, 1, gpus(2, 8, 1)) == spread_collective_s(
        10**9, Spread((4,)), 1, gpus(2, 8, 1)
    )


def test_a_gather_over_nodes_with_a_device_each_takes_as_many_steps_as_their_number_has_doublings() -> None:
    """5 nodes: 3 steps' latency for a ring's 4; with two devices on one of them it is a ring."""
    cluster = with_latency(5, 2)
    assert all_gather_s(10**9, [0, 2, 4, 6, 8], cluster) == pytest.approx(3 * 14e-6 + 0.8 / 10)
    ring_s = (1 * 8e-6 + 5 * 14e-6) / 6 + 1 / 6 / 10
    assert all_gather_s(10**9, [0, 1, 2, 4, 6, 8], cluster) == pytest.approx(5 * ring_s)
    by_gloo = cluster.model_copy(update={"backend": "gloo"})
    assert all_gather_s(10**9, [0, 2, 4, 6, 8], by_gloo) == pytest.approx(4 * (14e-6 + 0.2 / 10))


def test_small_sums_over_many_devices_are_faster_whole() -> None:
    """8 nodes of 8: of a ring's 64 hops 56 take 8 us and 8 take 14, and it goes 63; trees go 2 x (7 x 8 +
    3 x 14) us. Where bytes rule trees take them twice, and are slower; over gloo there are none.
    """
    spread, cluster = Spread((8,) * 8), with_latency(8, 8)
    ring_s = 63 * (56 * 8e-6 + 8 * 14e-6) / 64
    assert spread_collective_s(1, spread, 1, cluster) == pytest.approx(ring_s, rel=1e-3)
    assert spread_collective_s(1, spread, 2, cluster) == pytest.approx(196e-6, rel=1e-3)

    def is_faster_whole(num_bytes: int, where: Cluster) -> bool:
        ranged_s, whole_s = (spread_collective_s(num_bytes, spread, rounds, where) for rounds in (1, 2))
        return whole_s < ranged_s

    assert is_faster_whole(2**20, cluster)
    assert not is_faster_whole(2**26, cluster)
    assert not is_faster_whole(2**20, cluster.model_copy(update={"backend": "gloo"}))


def test_by_nodes_a_part_of_the_bytes_crosses_and_latency_is_that_of_a_node_and_of_doublings() -> None:
    """5 nodes of 4 behind 2 cards each: 3 steps of 1 GB at 100 GB/s inside; 3 doublings' latency, and 4/5 of
    four parts of 1 GB over 2 cards at 10 GB/s.
    """
    spread, cluster = Spread((4,) * 5), with_latency(5, 4, nics=2)
    expected = 3 * (8e-6 + 1 / 100) + 3 * 14e-6 + 4 / 5 * 4 / 20
    assert by_node_s(4 * 10**9, spread, cluster) == pytest.approx(expected, rel=1e-9)
    assert by_node_s(0, spread, cluster) == 0.0
    even = {counts: Spread(counts).goes_by_node for counts in ((4,), (1, 1), (2, 3), (2, 2), (3, 3, 3))}
    assert even == {(4,): False, (1, 1): False, (2, 3): False, (2, 2): True, (3, 3, 3): True}


def test_gloo_has_one_ring_however_many_cards() -> None:
    by_gloo = gpus(2, 4).model_copy(update={"backend": "gloo"})
    assert all_reduce_s(8e9, range(8), by_gloo) == pytest.approx(14 / 8 * 8e9 / 10e9)


def test_neighbours_send_through_the_same_card() -> None:
    assert gpus(2, 4, 2).card_of == ((0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1))
    assert gpus(1, 3, 2).card_of == ((0, 0), (0, 0), (0, 1))
    assert gpus(1, 2).card_of == ((0, 0), (0, 1))
    assert cluster_of(4, devices_per_node=2).card_of == ((0, 0), (0, 0), (1, 0), (1, 0))


def test_more_devices_never_sum_faster() -> None:
    for num_bytes in (1e3, 1e6, 1e9):
        seconds = [all_reduce_s(num_bytes, range(n), gpus(1, 8)) for n in range(1, 9)]
        assert seconds == sorted(seconds)


def test_a_few_bytes_go_up_and_down_a_tree_and_pay_each_hop_twice() -> None:
    """4 nodes of 2 GPUs: a hop of 8 us inside a node and two of 14 us between, up and down. A ring would pay
    14 steps of 11 us, rings inside and between the nodes 16 and 84 us.
    """
    links = Links(
        intra_node=Link(latency_us=8, bandwidth_gb_per_s=100),
        inter_node=Link(latency_us=14, bandwidth_gb_per_s=10),
    )
    cluster = gpus(4, 2).model_copy(update={"links": links})
    assert all_reduce_s(1, range(8), cluster) == pytest.approx(2 * (8e-6 + 2 * 14e-6), rel=1e-3)


def test_rings_are_as_many_as_the_node_with_fewest_devices_has_cards_for() -> None:
    """3 devices on one node and 2 on the other: 2 rings, 20 GB/s between; behind one card a node, 1 ring."""
    uneven = [0, 1, 2, 4, 5]
    assert all_gather_s(8e9, uneven, gpus(2, 4)) == pytest.approx(4 / 5 * 8e9 / 20e9)
    assert all_gather_s(8e9, uneven, gpus(2, 4, nics=1)) == pytest.approx(4 / 5 * 8e9 / 10e9)


def test_an_update_reads_and_writes_the_parameter_and_its_state_and_reads_and_clears_its_gradient() -> None:
    assert update_traffic(0.0) == 4
    assert update_traffic(2.0) == 4 + 2 * 2


def with_latency(nodes: int, per_node: int, nics: int | None = None) -> Cluster:
    """8 us and 100 GB/s inside a node, 14 us and 10 GB/s between."""
    links = Links(
        intra_node=Link(latency_us=8, bandwidth_gb_per_s=100),
        inter_node=Link(latency_us=14, bandwidth_gb_per_s=10),
    )
    return gpus(nodes, per_node, nics).model_copy(update={"links": links})


def test_a_ring_pays_the_latency_of_each_hop_that_it_has() -> None:
    """5 devices on 2 nodes: of a step's 5 hops 2 cross. Two rings: 4 steps of 2 GB at 20 GB/s."""
    hop_s = (3 * 8e-6 + 2 * 14e-6) / 5
    uneven = [0, 1, 2, 4, 5]
    assert all_gather_s(10**10, uneven, with_latency(2, 4)) == pytest.approx(4 * (hop_s + 2 / 20), rel=1e-9)


def test_one_device_a_node_makes_a_ring_of_crossings_alone() -> None:
    """3 nodes: 4 steps of 1 GB at 10 GB/s; inside a node nothing moves, so its link sets no pace."""
    slow_inside = Links(
        intra_node=Link(latency_us=1000, bandwidth_gb_per_s=1),
        inter_node=Link(latency_us=14, bandwidth_gb_per_s=10),
    )
    cluster = gpus(3, 2).model_copy(update={"links": slow_inside})
    assert all_reduce_s(3 * 10**9, [0, 2, 4], cluster) == pytest.approx(4 * (14e-6 + 0.1), rel=1e-9)
    assert all_gather_s(3 * 10**9, [0, 2, 4], cluster) == pytest.approx(2 * (14e-6 + 0.1), rel=1e-9)
    tree_s = _Shape(Spread((1, 1, 1)), cluster).tree_s(3 * 10**9)
    assert tree_s == pytest.approx(4 * 14e-6 + 2 * 0.3 / 0.9, rel=1e-9)


def test_rings_over_nodes_pay_latency_for_each_of_their_hops() -> None:
    """3 nodes of 4 devices behind one card: of 12 hops 3 cross; 11 and 22 steps of 1 GB at 10 GB/s."""
    step_s = (9 * 8e-6 + 3 * 14e-6) / 12 + 0.1
    cluster = with_latency(3, 4, nics=1)
    assert all_reduce_s(12 * 10**9, range(12), cluster) == pytest.approx(22 * step_s, rel=1e-9)
    assert all_gather_s(12 * 10**9, range(12), cluster) == pytest.approx(11 * step_s, rel=1e-9)


def test_of_a_tree_the_fullest_node_and_the_levels_over_nodes_count_and_its_slowest_link() -> None:
    """3 nodes of 3, 2 and 2 devices: two hops inside, two levels between; 1 KB twice over 2 cards at 10 GB/s,
    and of that 0.9 x 0.9.
    """
    uneven = [0, 1, 2, 4, 5, 8, 9]
    expected = 2 * (2 * 8e-6 + 2 * 14e-6) + 2 * 1000 / 20e9 / 0.81
    assert all_reduce_s(1000, uneven, with_latency(3, 4)) == pytest.approx(expected, rel=1e-9)
    # Inside one node, 2 devices: a ring has as many hops as a tree, and half of the bytes a step.
    assert all_reduce_s(1000, [0, 1], with_latency(3, 4)) == pytest.approx(2 * (8e-6 + 500 / 100e9), rel=1e-9)


def test_a_curve_holds_from_its_first_point_to_its_last_and_between_by_the_logarithm() -> None:
    link = Link(latency_us=0, bandwidth_gb_per_s=9, curve=((10.0, 1.0), (1000.0, 3.0), (10**5, 4.0)))
    expected = {9.9: 1.0, 10: 1.0, 100: 2.0, 1000: 3.0, 10**4: 3.5, 10**5: 4.0, 10**6: 4.0}
    found = {num_bytes: bandwidth_bytes_per_s(num_bytes, link) / 1e9 for num_bytes in expected}
    assert found == pytest.approx(expected)


def test_nothing_to_sum_or_nobody_to_sum_with_takes_no_time() -> None:
    for formula in (all_reduce_s, all_gather_s):
        assert formula(0, range(4), with_latency(2, 4)) == 0.0
        assert formula(1, [2], with_latency(2, 4)) == 0.0
        assert formula(1, [2, 3], with_latency(2, 4)) > 0.0


def test_a_collective_of_two_rounds_is_a_sum_and_one_of_one_a_gather() -> None:
    cluster = with_latency(2, 4)
    assert spread_collective_s(10**9, Spread((2, 4)), 2, cluster) == all_reduce_s(
        10**9, [0, 1, 4, 5, 6, 7], cluster
    )
    assert spread_collective_s(10**9, Spread((2, 4)), 1, cluster) == all_gather_s(
        10**9, [0, 1, 4, 5, 6, 7], cluster
    )


def test_communicators_take_what_was_seen_of_them() -> None:
    """8 channels of 14 MiB to each device of the node, and for all outside two pools of 8 x 16 x 128 KiB."""
    mib = 2**20
    found = [messages_bytes(inside, outside=outside) / mib for inside in (0, 3) for outside in (False, True)]
    assert found == [0, 32, 3 * 8 * 14, 3 * 8 * 14 + 32]


def test_collectives_take_a_ring_and_a_tree_in_every_channel() -> None:
    """12 MiB for a ring and twice as much for each of a tree's links, of which n devices have n - 1."""

    def mib(devices: Sequence[int], per_node: int = 4, nics: int | None = None) -> float:
        return collectives_bytes(devices, gpus(3, per_node, nics)) / MIB

    # Inside of a node 24 channels: 544 and 688 MiB were seen of two and of more.
    assert [mib(range(count)) for count in (1, 2, 3, 4)] == [0, 24 * 24, 24 * 28, 24 * 30]
    # Of several nodes two for each card: of the node that has fewest.
    assert mib(range(8)) == 8 * 12 * 22 / 8
    assert mib([0, 4]) == 2 * 24
    assert mib([0, 1, 2, 3, 4, 5]) == 4 * 12 * 16 / 6
    assert mib(range(8), nics=1) == 2 * 12 * 22 / 8
    assert mib(range(8), nics=2) == 4 * 12 * 22 / 8
    assert mib([0, 1, 4, 5], nics=2) == 2 * 30  # two neighbours share a card
    assert [mib(range(2 * size), size) for size in (12, 16)] == [24 * 12 * 70 / 24, 24 * 12 * 94 / 32]


def test_over_many_nodes_a_sum_by_nodes_is_fastest_and_a_scatter_at_once_slowest() -> None:
    """32 MiB over 128 nodes of eight."""
    cluster = Cluster.read(Path(__file__).parents[2] / "configs" / "clusters" / "a800-128x8.yaml")
    spread = per_node(range(cluster.num_devices), cluster)
    at_once_s, whole_s = (spread_collective_s(32 * MIB, spread, rounds, cluster) for rounds in (1, 2))
    by_s = by_node_s(32 * MIB, spread, cluster)
    assert (at_once_s, whole_s, by_s) == pytest.approx((4.5e-3, 1.0e-3, 0.4e-3), abs=0.05e-3)
