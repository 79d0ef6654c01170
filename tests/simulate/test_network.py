"""Flows on shared links, solved by hand."""

from __future__ import annotations

import pytest

from spindle_cli.costs.links import all_reduce_s, transfer_s
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.simulate.network import Network, Stream

GB = 10**9


def cluster(device: str = "a800-80gb", nics: int | None = None, devices: int = 2) -> Cluster:
    """Two nodes of two devices; 1 GB/s inside and 0.5 GB/s between, without latency."""
    return Cluster(
        name="test",
        nodes=(NodeGroup(count=2, devices=devices, device=device, memory_gib=1, nics=nics),),
        links=Links(
            intra_node=Link(latency_us=0, bandwidth_gb_per_s=1),
            inter_node=Link(latency_us=0, bandwidth_gb_per_s=0.5),
        ),
    )


def enter(network: Network, now_s: float, *streams: Stream) -> dict[Stream, float]:
    """Let streams enter together; the ends that this sets."""
    for stream in streams:
        network.enter(stream, now_s)
    return {stream: end_s for end_s, stream in network.settle(now_s)}


def test_alone_a_transfer_takes_what_the_formula_says() -> None:
    network = Network(cluster())
    stream = network.transfer(0, 1, GB)
    assert enter(network, 5.0, stream) == {stream: pytest.approx(6.0)}


def test_two_from_one_device_share_its_port() -> None:
    network = Network(cluster())
    streams = network.transfer(0, 2, GB), network.transfer(0, 3, GB)
    assert list(enter(network, 0.0, *streams).values()) == pytest.approx([4.0, 4.0])


def test_there_and_back_do_not_slow_each_other_down() -> None:
    network = Network(cluster())
    streams = network.transfer(0, 1, GB), network.transfer(1, 0, GB)
    assert list(enter(network, 0.0, *streams).values()) == pytest.approx([1.0, 1.0])


def test_inside_and_between_nodes_are_different_ports() -> None:
    network = Network(cluster())
    streams = network.transfer(0, 1, GB), network.transfer(0, 2, GB)
    assert list(enter(network, 0.0, *streams).values()) == pytest.approx([1.0, 2.0])


def test_devices_of_a_cpu_node_share_its_network_card() -> None:
    network = Network(cluster("cpu"))
    streams = network.transfer(0, 2, GB), network.transfer(1, 3, GB)
    assert list(enter(network, 0.0, *streams).values()) == pytest.approx([4.0, 4.0])
    network = Network(cluster("a800-80gb"))
    streams = network.transfer(0, 2, GB), network.transfer(1, 3, GB)
    assert list(enter(network, 0.0, *streams).values()) == pytest.approx([2.0, 2.0])


def test_devices_behind_one_card_share_it_and_neighbours_behind_two_share_theirs() -> None:
    """4 devices of a node send 1 GB each at 0.5 GB/s a card."""
    for nics, seconds in ((1, 8.0), (2, 4.0), (4, 2.0), (None, 2.0)):
        network = Network(cluster(nics=nics, devices=4))
        streams = [network.transfer(device, 4 + device, GB) for device in range(4)]
        assert list(enter(network, 0.0, *streams).values()) == pytest.approx([seconds] * 4)
    network = Network(cluster(nics=2, devices=4))
    streams = [network.transfer(device, 4, GB) for device in (0, 2)]
    assert list(enter(network, 0.0, *streams).values()) == pytest.approx([4.0, 4.0]), "one card takes both in"


def test_cards_of_a_node_share_what_a_sum_passes_on() -> None:
    """1 GB over 2 nodes of 4 devices: each node passes 1 GB on, a half on each of its two cards."""
    network = Network(cluster(nics=2, devices=4))
    total = network.collective(range(8), GB, 2)
    cards = [use.demand for use in total.uses if use.port % 4 < 2]
    assert cards == [pytest.approx(0.5 * GB / total.left_s / (0.5 * GB))] * 8, "2 nodes, 2 cards, both ways"


def test_a_sum_and_a_transfer_share_the_cards_that_the_sum_uses() -> None:
    """The sum over both nodes passes 1 GB through the one card in 2 s; alone a transfer takes 2 s as well."""
    network = Network(cluster(nics=1))
    total = network.collective(range(4), GB, 2)
    assert total.left_s == pytest.approx(all_reduce_s(GB, range(4), network.cluster))
    demand = max(use.demand for use in total.uses if use.port in (0, 1))
    assert demand == pytest.approx(GB / total.left_s / (0.5 * GB))
    transfer = network.transfer(1, 2, GB)
    ends = enter(network, 0.0, total, transfer)
    assert ends[transfer] == pytest.approx(2.0 * (1 + demand))
    assert ends[total] == pytest.approx(total.left_s * (1 + demand))


def test_who_comes_later_slows_down_and_who_leaves_speeds_up() -> None:
    """1 GB alone for 0.5 s, shared until the second (0.25 GB) is through at 1.0 s, then alone again: 1.25
    s.
    """
    network = Network(cluster())
    first, second = network.transfer(0, 1, GB), network.transfer(0, 1, GB // 4)
    enter(network, 0.0, first)
    ends = enter(network, 0.5, second)
    assert ends == {first: pytest.approx(1.5), second: pytest.approx(1.0)}
    network.leave(second)
    assert network.settle(1.0) == [(pytest.approx(1.25), first)]


def test_small_messages_that_do_not_fill_a_port_go_side_by_side() -> None:
    """Of 1 GB/s a small message only reaches 0.25: four fit."""
    slow_start = Link(latency_us=0, bandwidth_gb_per_s=1, curve=((1000, 0.25), (1_000_000, 1)))
    network = Network(
        cluster().model_copy(update={"links": Links(intra_node=slow_start, inter_node=slow_start)})
    )
    streams = [network.transfer(0, 1, 1000) for _ in range(4)]
    assert list(enter(network, 0.0, *streams).values()) == pytest.approx([4e-6] * 4)


def test_alone_a_sum_takes_what_the_formula_says_and_two_share() -> None:
    network = Network(cluster())
    alone_s = all_reduce_s(GB, (0, 1), network.cluster)
    first, second = network.collective((0, 1), GB, 2), network.collective((0, 1), GB, 2)
    ends = enter(network, 0.0, first)
    assert first.latency_s + ends[first] == pytest.approx(alone_s)
    ends = enter(network, 0.0, second)
    assert ends[second] == pytest.approx(2 * alone_s, rel=1e-6)


def test_nothing_takes_no_time() -> None:
    network = Network(cluster())
    stream = network.transfer(0, 1, 0)
    assert (stream.latency_s, stream.left_s) == (0.0, 0.0)
    assert transfer_s(0, network.cluster.links.intra_node) == 0.0


def test_a_sum_takes_its_members_ports_and_the_cards_of_as_many_as_a_node_has() -> None:
    """3 GB over two devices of node 0 and one of node 1, gathered by one ring: 2 steps of 1 GB at 0.5 GB/s.
    Inside node 0 each device passes 1.5 GB on in these 4 s, at 1 GB/s; between the nodes two cards 0.75 GB
    each, and node 1's one 1.5 GB. A sum by trees crosses once with all of it, at nine tenths of 0.5 GB/s.
    """
    network = Network(cluster())

    def uses_in(seconds: float, num_gb: float) -> dict[int, float]:
        device = {0: (2, 3), 1: (6, 7)}  # the ports in and out of each device, and of each card
        card = {0: (0, 1), 1: (4, 5), 2: (8, 9)}
        expected = {port: num_gb / seconds for ports in device.values() for port in ports}
        expected |= {port: num_gb / 2 / seconds / 0.5 for ports in (card[0], card[1]) for port in ports}
        return expected | dict.fromkeys(card[2], num_gb / seconds / 0.5)

    for rounds, seconds, num_gb in ((1, 4.0, 1.5), (2, 20 / 3, 3.0)):
        stream = network.collective((0, 1, 2), 3 * GB, rounds)
        assert (stream.latency_s, stream.left_s) == (pytest.approx(0.0, abs=1e-7), pytest.approx(seconds))
        assert {use.port: use.demand for use in stream.uses} == pytest.approx(uses_in(seconds, num_gb))


def test_by_nodes_it_takes_the_same_ports_for_as_long_as_by_nodes() -> None:
    """3 GB gathered over two nodes of two, two cards each at 0.5 GB/s: 0.75 GB of each part between, and 1.5
    GB inside at 1 GB/s; around all four 3 steps of 0.75 GB at 1 GB/s.
    """
    network = Network(cluster())
    stream = network.collective((0, 1, 2, 3), 3 * GB, 1, by_node=True)
    assert (stream.latency_s, stream.left_s) == (pytest.approx(0.0, abs=1e-7), pytest.approx(1.5 + 1.5))
    around = network.collective((0, 1, 2, 3), 3 * GB, 1)
    assert around.left_s == pytest.approx(2.25)
    assert [use.port for use in stream.uses] == [use.port for use in around.uses]


@pytest.mark.parametrize(
    ("nics", "first", "second"),
    [
        (4, {(0, 0), (0, 2), (1, 0), (1, 2)}, {(0, 1), (0, 3), (1, 1), (1, 3)}),  # a card each: their own
        (3, {(0, 0), (0, 1), (1, 0), (1, 1)}, {(0, 0), (0, 2), (1, 0), (1, 2)}),  # 0 and 1 share one
        (1, {(0, 0), (1, 0)}, {(0, 0), (1, 0)}),
    ],
)
def test_sums_go_over_the_cards_of_their_own_devices(
    nics: int, first: set[tuple[int, int]], second: set[tuple[int, int]]
) -> None:
    """Every other device of two nodes of four, and the rest."""
    network = Network(cluster(nics=nics, devices=4))
    streams = [network.collective(devices, GB, 2) for devices in ((0, 2, 4, 6), (1, 3, 5, 7))]
    cards = [{use.port for use in stream.uses if use.port % 4 == 0} for stream in streams]
    assert cards == [{4 * (4 * node + card) for node, card in own} for own in (first, second)]


def test_two_devices_behind_one_card_sum_over_another_one_too() -> None:
    """As the formula has as many cards as a node has devices of the sum."""
    network = Network(cluster(nics=2, devices=4))
    cards = {use.port for use in network.collective((0, 1, 4, 5), GB, 2).uses if use.port % 4 == 0}
    assert cards == {0, 4, 16, 20}


def test_the_latency_of_a_message_and_of_a_sum_s_hops_loads_no_port() -> None:
    link = Link(latency_us=1000, bandwidth_gb_per_s=1)
    network = Network(cluster().model_copy(update={"links": Links(intra_node=link, inter_node=link)}))
    message = network.transfer(0, 1, GB)
    assert (message.latency_s, message.left_s) == (pytest.approx(0.001), pytest.approx(1.0))
    total = network.collective((0, 1), GB, 2)
    assert (total.latency_s, total.left_s) == (pytest.approx(0.002), pytest.approx(1.0))
    assert all(use.demand == pytest.approx(1.0) for use in (*message.uses, *total.uses))


def test_of_ports_that_are_shared_unequally_the_slowest_counts_and_stays_so_for_the_rest() -> None:
    """Device 0 sends to 1 and, twice, between the nodes; device 1 sends between them too, by another card."""
    network = Network(cluster(devices=4, nics=4))
    inside = network.transfer(0, 1, GB)
    across = [network.transfer(0, destination, GB) for destination in (4, 5)]
    beside = network.transfer(1, 4, GB)
    ends = enter(network, 0.0, inside, *across, beside)
    # Card 0 out carries two; card 4 in carries one of them and device 1's.
    assert [ends[stream] for stream in (inside, *across, beside)] == pytest.approx([1.0, 4.0, 4.0, 4.0])
    network.leave(inside)
    assert network.settle(1.0) == []
    network.leave(across[1])
    assert network.settle(2.0) == []
    network.leave(beside)
    assert network.settle(3.0) == [(pytest.approx(3.5), across[0])]
