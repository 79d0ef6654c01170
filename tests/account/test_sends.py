"""What tensor-parallel groups are sent: whole chunks, or parts that they gather."""

from __future__ import annotations

import pytest

from spindle_cli.account.activations import WHOLE, Layout, handed_over, part_of
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup

ONE, TWO = Layout((0,), 1, 1, 8), Layout((0, 1), 2, 1, 8)


def cluster(
    *, inside: float = 10.0, between: float = 1.0, latency_us: float = 0.0, cards: int = 4
) -> Cluster:
    """Two nodes of four devices; links in GB/s."""
    nodes = NodeGroup(count=2, devices=4, device="cpu", memory_gib=4, nics=cards)
    links = (Link(latency_us=latency_us, bandwidth_gb_per_s=speed) for speed in (inside, between))
    return Cluster(
        name="two", nodes=(nodes,), links=Links(**dict(zip(("intra_node", "inter_node"), links, strict=True)))
    )


def test_parts_are_equal_but_for_the_last_ones() -> None:
    assert [part_of(10, (number, 4)) for number in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [part_of(2, (number, 4)) for number in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]
    assert part_of(10, WHOLE) == (0, 10)


def test_a_group_on_another_node_is_sent_a_part_each_and_gathers_them() -> None:
    """4 GB from one device over its card: 8 s to send them to two, 4 to send a half to each, and 0.2 s to
    gather: each half once around at 10 GB/s.
    """
    group = Layout((5, 4), 1, 2, 8)
    over = handed_over(ONE, group, 4 * 10**9, cluster())
    assert over.sends == (
        (0, 4, 0, 8, (0, 2), 2 * 10**9),
        (0, 5, 0, 8, (1, 2), 2 * 10**9),
    )
    assert over.gather_s == pytest.approx(0.2)


def test_chunks_of_a_share_are_sent_in_parts_each_and_gathered_one_after_the_other() -> None:
    over = handed_over(TWO, Layout((4, 5), 1, 2, 8), 4 * 10**9, cluster())
    assert [(send[:4], send.part) for send in over.sends] == [
        ((0, 4, 0, 4), (0, 2)),
        ((1, 4, 4, 8), (0, 2)),
        ((0, 5, 0, 4), (1, 2)),
        ((1, 5, 4, 8), (1, 2)),
    ]
    assert sum(send.num_bytes for send in over.sends) == 4 * 10**9
    assert over.gather_s == pytest.approx(2 * 0.1)


@pytest.mark.parametrize(
    ("source", "group", "why"),
    [
        (ONE, Layout((1, 2), 1, 2, 8), "all on one node"),
        (Layout((4,), 1, 1, 8), Layout((4, 5), 1, 2, 8), "who has the rows sends them"),
        (Layout((0, 4), 2, 1, 8), Layout((4, 5), 1, 2, 8), "one has a part of the rows"),
        (ONE, Layout((4, 5), 2, 1, 8), "each takes its own rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_is_sent_in_parts(source: Layout, group: Layout, why: str) -> None:
    over = handed_over(source, group, 4 * 10**9, cluster())
    assert {send.part for send in over.sends} == {WHOLE}
    assert over.gather_s == 0.0


def test_what_is_faster_whole_is_sent_whole() -> None:
    """From two devices with a card each: 4 s whole, 2 s in parts and 2 GB at the speed inside."""
    source, group = Layout((0, 1), 1, 2, 8), Layout((4, 5), 1, 2, 8)
    fast, slow = (handed_over(source, group, 4 * 10**9, cluster(inside=speed)) for speed in (1.01, 0.99))
    assert {send.part for send in fast.sends} == {(0, 2), (1, 2)}
    assert {send.part for send in slow.sends} == {WHOLE}
    # And where a gather waits longer than it saves: 2 us for 1 us.
    late = handed_over(source, group, 2000, cluster(inside=1e6, latency_us=2))
    assert {send.part for send in late.sends} == {WHOLE}


def test_those_that_share_a_card_are_sent_in_parts_though_links_inside_are_slow() -> None:
    """8 s whole over one card; 4 s in parts and 2.2 to gather."""
    source, group = Layout((0, 1), 1, 2, 8), Layout((4, 5), 1, 2, 8)
    over = handed_over(source, group, 4 * 10**9, cluster(inside=0.9, cards=1))
    assert {send.part for send in over.sends} == {(0, 2), (1, 2)}
