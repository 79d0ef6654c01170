"""Halves of the devices that exchange messages, by hand and on random pairs."""

from __future__ import annotations

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from spindle_cli.account.traffic import find_communicator_ranks, peers_bytes, sides_of
from spindle_cli.account.types import Purpose
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup

Pairs = list[tuple[int, int]]


@pytest.mark.parametrize(
    ("pairs", "sides"),
    [
        ([], {}),
        ([(1, 0)], {0: 0, 1: 1}),
        ([(0, 1), (1, 2), (2, 3)], {0: 0, 1: 1, 2: 0, 3: 1}),
        # 0 and 1 are of one half only seen from 3, behind them.
        ([(0, 3), (3, 1), (1, 2)], {0: 0, 1: 0, 2: 1, 3: 1}),
        # Two parts: each begins with its least.
        ([(5, 2), (4, 1)], {1: 0, 2: 0, 4: 1, 5: 1}),
        # A ring of three: one pair is inside of a half. 2 has one peer in each, and goes to the first.
        ([(0, 1), (1, 2), (2, 0)], {0: 0, 1: 1, 2: 0}),
        # The same where 2 exchanges more with 0 than with 1.
        ([(0, 1), (1, 2), (2, 0), (0, 2)], {0: 0, 1: 1, 2: 1}),
        # 4 exchanges messages with 1 and 3, which are in the second half, and with 2, in the first.
        ([(0, 1), (0, 2), (0, 3), (1, 2), (4, 1), (4, 2), (4, 3)], {0: 0, 1: 1, 2: 0, 3: 1, 4: 0}),
    ],
)
def test_halves_by_hand(pairs: Pairs, sides: dict[int, int]) -> None:
    assert sides_of(pairs) == sides
    assert sides_of([(b, a) for a, b in reversed(pairs)]) == sides


def random_pairs() -> st.SearchStrategy[Pairs]:
    device = st.integers(0, 11)
    return st.lists(st.tuples(device, device).filter(lambda pair: pair[0] != pair[1]), max_size=30)


@examples(200)
@given(random_pairs())
def test_no_pair_is_inside_of_a_half_where_that_can_be(pairs: Pairs) -> None:
    sides = sides_of(pairs)
    graph = networkx.Graph(pairs)
    assert set(sides) == set(graph)
    for part in networkx.connected_components(graph):
        inside = [pair for pair in graph.subgraph(part).edges if sides[pair[0]] == sides[pair[1]]]
        assert not inside or not networkx.is_bipartite(graph.subgraph(part))


@examples(100)
@given(random_pairs())
def test_halves_take_no_more_memory_than_two_communicators_of_all(pairs: Pairs) -> None:
    """Four nodes of three; each message goes back, too, as its gradient."""
    link = Link(latency_us=1, bandwidth_gb_per_s=1)
    groups = (NodeGroup(count=4, devices=3, device="a800-80gb", memory_gib=80),)
    cluster = Cluster(name="gpus", nodes=groups, links=Links(intra_node=link, inter_node=link))
    pairs = [*pairs, *((b, a) for a, b in pairs)]
    halves = [each for each in find_communicator_ranks(12, pairs, (), ()) if each.purpose is Purpose.MESSAGES]
    assert len(halves) == (2 if pairs else 0)
    for device in range(12):
        peers = {b for a, b in pairs if a == device}
        over = [
            {b for a, b in pairs if a == device and (device in half.senders or b in half.senders)}
            for half in halves
        ]
        taken = sum(peers_bytes(device, each, cluster) for each in over if each)
        assert taken <= 2 * (peers_bytes(device, peers, cluster) if peers else 0)


def test_each_half_has_those_who_send_and_those_who_receive_of_them() -> None:
    found = [each for each in find_communicator_ranks(6, [(1, 2), (2, 4)], (), ()) if each.senders]
    assert [(each.ranks, each.senders) for each in found] == [((1, 2), (1,)), ((2, 4), (2,))]
