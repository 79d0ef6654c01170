"""The cost formulas on cases computed by hand."""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of
from spindle_cli.costs.links import all_gather_s, all_reduce_s, bandwidth_bytes_per_s, transfer_s
from spindle_cli.costs.update import update_traffic
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup


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
    even = all_reduce_s(8e9, range(8), gpus(2, 4))
    assert even <= 14 / 8 * 8e9 / 40e9 + 1e-12
    assert all_reduce_s(8e9, [0, 1, 2, 3, 4], gpus(2, 4)) == pytest.approx(8 / 5 * 8e9 / 10e9)


@pytest.mark.parametrize(("nics", "between_s"), [(1, 0.8), (2, 0.4), (4, 0.2), (8, 0.2), (None, 0.2)])
def test_a_sum_over_nodes_shares_the_cards_that_there_are(nics: int | None, between_s: float) -> None:
    """2 x 4 devices, 8 GB: inside the nodes 6 steps of 2 GB at 100 GB/s; between them each of the 4 devices
    passes 2 GB on, by all the cards together at 10 GB/s each.
    """
    assert all_reduce_s(8e9, range(8), gpus(2, 4, nics)) == pytest.approx(0.12 + between_s)


def test_a_gather_over_nodes_shares_the_cards_that_there_are() -> None:
    """Half of the sum's bytes: 3 steps of 2 GB inside, 4 x 1 GB between."""
    assert all_gather_s(8e9, range(8), gpus(2, 4, 1)) == pytest.approx(0.06 + 0.4)


def test_two_devices_of_a_node_use_two_of_its_cards() -> None:
    """Two rings side by side over one device pair of each node: 6 steps of 2 GB at 2 x 10 GB/s."""
    assert all_reduce_s(8e9, [0, 1, 4, 5], gpus(2, 4, 3)) == pytest.approx(0.08 + 0.4)
    assert all_reduce_s(8e9, [0, 1, 4, 5], gpus(2, 4, 1)) == pytest.approx(0.08 + 0.8)


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
    assert all_reduce_s(8e9, uneven, gpus(2, 4)) == pytest.approx(8 / 5 * 8e9 / 20e9)
    assert all_gather_s(8e9, uneven, gpus(2, 4)) == pytest.approx(4 / 5 * 8e9 / 20e9)
    assert all_reduce_s(8e9, uneven, gpus(2, 4, nics=1)) == pytest.approx(8 / 5 * 8e9 / 10e9)


def test_an_update_reads_and_writes_the_parameter_and_its_state_and_reads_and_clears_its_gradient() -> None:
    assert update_traffic(0.0) == 4
    assert update_traffic(2.0) == 4 + 2 * 2
