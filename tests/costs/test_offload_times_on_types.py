"""How long passes wait for copies where a slice's shares lie on devices of several types, solved by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from test_offload_times import net, piece

from spindle_cli.costs.beyond_curve import Stalls, stalls, stalls_of_share
from spindle_cli.costs.shares import OpSeconds
from spindle_cli.files.cluster import Cluster, GroupLinks, Link, Links, NodeGroup
from spindle_cli.plan.types import Slice

FAST, SLOW = "a100-80gb", "v100-32gb"


def host(gb_per_s: float) -> Link:
    return Link(latency_us=0, bandwidth_gb_per_s=gb_per_s)


def cluster(
    own: Mapping[str, float], for_all: float | None = None, devices: int = 1, **group: Any
) -> Cluster:
    """A node of each type; GB/s of the links to their memory, of their own and of the whole cluster."""
    nodes = tuple(
        NodeGroup(
            devices=devices,
            device=kind,
            memory_gib=80,
            links=GroupLinks(host=host(own[kind])) if kind in own else None,
            **group,
        )
        for kind in (FAST, SLOW)
    )
    link = Link(latency_us=0, bandwidth_gb_per_s=100)
    whole = None if for_all is None else host(for_all)
    return Cluster(name="two", nodes=nodes, links=Links(intra_node=link, inter_node=link, host=whole))


def uneven(num_ops: int, offload: tuple[tuple[int, int], ...], **more: Any) -> Slice:
    """Of 8 samples 6 on the fast device, 2 on the slow one."""
    return piece(num_ops, offload, **{"devices": [0, 1], "dp": 2, "rows": (0, 6, 8), **more})


def seconds(found: Stalls) -> tuple[float, float]:
    return found.forward_s, found.backward_s


ALIKE = (OpSeconds(1.0, 2.0), OpSeconds(1.0, 2.0))


def test_the_last_share_sets_how_long_a_slice_waits_and_each_has_copies_of_its_own() -> None:
    """Of 8 GB an op the fast device keeps 6, which take 3 s, the slow one 2, which take 4 s: of four ops of
    1 s and 2 s that are all moved, copies out end at 13 s and 17 s, backward passes at 14 s and 18 s.
    """
    made, on = uneven(4, ((0, 4),)), cluster({FAST: 2.0, SLOW: 0.5})
    own = [stalls_of_share(made, net(4, 8.0), on, share, ALIKE[0]) for share in (0, 1)]
    assert [seconds(each) for each in own] == [pytest.approx((9, 6)), pytest.approx((13, 10))]
    assert seconds(stalls(made, net(4, 8.0), on, ALIKE[0], ALIKE)) == pytest.approx((13, 10))
    # With as fast a link the small share's copies hide: the large one's hold up the slice.
    even = cluster({}, 2.0)
    assert seconds(stalls(made, net(4, 8.0), even, ALIKE[0], ALIKE)) == pytest.approx((9, 6))


@pytest.mark.parametrize(
    ("kept_gb", "own", "whole"),
    [(2.0, (1.0, 0.5), (0, 0)), (4.0, (2.5, 2.0), (1.5, 0)), (6.0, (4.0, 3.5), (3.0, 1.5))],
)
def test_a_share_that_is_through_before_the_slowest_has_as_much_longer_for_its_copies(
    kept_gb: float, own: tuple[float, float], whole: tuple[float, float]
) -> None:
    """Two ops, the first moved; on the fast device 0.5 s and 1 s each, on the slow one 1 s and 2 s. A copy of
    c s ends at 0.5 + c, where the slow one computes until 2 s; back it ends at c, and 1 s later the pass,
    where the slow one's ends at 4 s.
    """
    copy_s = kept_gb * 6 / 8
    ops = OpSeconds(0.5, 1.0), OpSeconds(1.0, 2.0)
    made, on = uneven(2, ((0, 1),)), cluster({FAST: 1.0, SLOW: 1000.0})
    assert own == (0.5 + copy_s - 1.0, max(copy_s, 1.0) + 1.0 - 2.0)
    assert seconds(stalls_of_share(made, net(2, kept_gb), on, 0, ops[0])) == pytest.approx(own)
    assert seconds(stalls(made, net(2, kept_gb), on, ops[1], ops)) == pytest.approx(whole, abs=1e-12)


def test_what_a_share_computes_again_hides_its_copies() -> None:
    """The second op runs forward again in 1.5 s backward, in which copies of 1.75 s come back."""
    made, on = uneven(2, ((0, 1),), recompute=True), cluster({FAST: 6 / 8 / 1.75, SLOW: 1000.0})
    fast = OpSeconds(0.5, 1.0)
    assert seconds(stalls_of_share(made, net(2, 1.0), on, 0, fast)) == pytest.approx((1.25, 0.25))
    # The slice takes 2 s and 3 s backward, the fast share 2.75.
    ops = fast, OpSeconds(1.0, 2.0)
    assert seconds(stalls(made, net(2, 1.0), on, ops[1], ops)) == pytest.approx((0.25, 0))


def test_no_pass_gets_shorter_where_none_of_the_shares_is_slowest_in_both() -> None:
    """Forward one share is the slowest, backward the other: what is planned is longer than either of both."""
    ops = OpSeconds(2.0, 1.0), OpSeconds(1.0, 2.0)
    made, on = uneven(3, ((0, 1),), recompute=True), cluster({FAST: 1000.0, SLOW: 1000.0})
    assert seconds(stalls(made, net(3, 1.0), on, OpSeconds(2.0, 2.0), ops)) == (0, 0)


def test_a_share_of_several_devices_has_the_link_of_their_node() -> None:
    """Two pairs: the second one's copies take 4 s over the slow node's link, the first one's next to none."""
    on = cluster({FAST: 1000.0, SLOW: 1.0}, devices=2)
    memory = net(1, 8.0).memory[0].model_copy(update={"tp": 2})
    metaop = net(1, 8.0).model_copy(update={"memory": (memory,)})
    made = piece(1, ((0, 1),), devices=[0, 1, 2, 3], dp=2, tp=2)
    own = [stalls_of_share(made, metaop, on, share, ALIKE[0]) for share in (0, 1)]
    assert [seconds(each) for each in own] == [pytest.approx((0.004, 0.004)), pytest.approx((4, 4))]
    assert seconds(stalls(made, metaop, on, ALIKE[0], ALIKE)) == pytest.approx((4, 4))


def test_what_has_no_link_waits_for_nothing() -> None:
    made, on = uneven(4, ((0, 4),)), cluster({FAST: 2.0})
    assert stalls_of_share(made, net(4, 8.0), on, 1, ALIKE[0]) == Stalls()
    assert seconds(stalls(made, net(4, 8.0), on, ALIKE[0], ALIKE)) == pytest.approx((9, 6))
    assert stalls(made, net(4, 8.0), cluster({}), ALIKE[0], ALIKE) == Stalls()
    assert stalls(uneven(4, ()), net(4, 8.0), on, ALIKE[0], ALIKE) == Stalls()
    assert stalls_of_share(uneven(4, ()), net(4, 8.0), on, 0, ALIKE[0]) == Stalls()


def test_a_groups_own_link_stands_for_the_clusters_and_neighbours_share_it() -> None:
    on = cluster({FAST: 24.0}, 12.0, devices=8, host_links=4)
    speeds = [link and link.bandwidth_gb_per_s for link in on.host_link_of_node]
    assert speeds == [12, 6]
    assert {kind: link and link.bandwidth_gb_per_s for kind, link in on.host_link_of_type.items()} == {
        FAST: 12,
        SLOW: 6,
    }
    assert on.host_link == host(6)
    assert on.host_link_among([0]) == host(12)
    assert on.host_link_among([0, 1]) == host(6)
    assert on.host_link_among([]) is None


def test_the_slowest_nodes_of_a_type_count_and_one_without_a_link_has_none() -> None:
    nodes = (
        NodeGroup(devices=2, device=FAST, memory_gib=80, name="new"),
        NodeGroup(devices=2, device=FAST, memory_gib=80, name="old", host_links=1),
        NodeGroup(devices=2, device=SLOW, memory_gib=32),
    )
    link = host(10)
    on = Cluster(name="three", nodes=nodes, links=Links(intra_node=link, inter_node=link, host=link))
    assert on.host_link_of_type == {FAST: host(5), SLOW: host(10)}
    assert not on.without_host_link().knows_host_links
    assert on.without_host_link().nodes == nodes
    assert on.without_host_link().links.host is None
