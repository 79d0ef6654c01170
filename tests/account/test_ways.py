"""Which groups are summed and gathered as a whole, though each device needs a range, and what that moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.groups import with_ways
from spindle_cli.account.step_end import collectives_of_step
from spindle_cli.account.traffic import find_communicator_ranks
from spindle_cli.account.types import Collective, ParameterGroup, Purpose
from spindle_cli.costs.links import by_node_s, per_node, spread_all_gather_s, spread_all_reduce_s
from spindle_cli.costs.parameters import parts_collective_s
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.runtime.communication.collectives import Members


def gpus(backend: str = "nccl", *, nics: int | None = None) -> Cluster:
    """8 nodes of 8."""
    return Cluster(
        name="gpus",
        nodes=(NodeGroup(count=8, devices=8, device="a800-80gb", memory_gib=80, nics=nics),),
        links=Links(
            intra_node=Link(latency_us=8, bandwidth_gb_per_s=100),
            inter_node=Link(latency_us=14, bandwidth_gb_per_s=10),
        ),
        backend=backend,  # type: ignore[arg-type]
    )


EVERYONE = tuple(range(64))
SMALL, LARGE = 2**16, 2**30
GROUP = ParameterGroup(0, EVERYONE, (("net", 0),), SMALL, LARGE, (0,), (0,), (0, 1))
# All but 7 devices of a node.
UNEVEN = (0, *range(8, 64))


def ways_of(group: ParameterGroup, cluster: Cluster | None = None, *, sharded: bool = True) -> ParameterGroup:
    (found,) = with_ways([group], (), cluster or gpus(), sharded=sharded)
    assert replace(found, sums_whole=False, gathers_whole=False, nodes=()) == group
    return found


def whole(group: ParameterGroup) -> tuple[bool, bool]:
    assert not group.nodes
    return group.sums_whole, group.gathers_whole


def test_each_collective_of_a_group_goes_the_way_that_is_faster_for_its_bytes() -> None:
    """Over nodes with different numbers of devices, which cannot go by nodes."""
    spread = per_node(UNEVEN, gpus())
    faster = [
        spread_all_reduce_s(size, spread, gpus()) < spread_all_gather_s(size, spread, gpus())
        for size in (SMALL, LARGE)
    ]
    assert faster == [True, False]
    group = replace(GROUP, devices=UNEVEN)
    assert whole(ways_of(group)) == (True, False)
    assert whole(ways_of(replace(group, num_bytes=LARGE, parameter_bytes=SMALL))) == (False, True)
    assert whole(ways_of(replace(group, num_bytes=LARGE))) == (False, False)
    # Of two neighbours a ring has one hop.
    assert whole(ways_of(replace(group, devices=(0, 1)))) == (False, False)


def test_what_is_faster_by_nodes_goes_by_nodes() -> None:
    """Behind slow links half as much crosses, of 4 devices on 2 nodes; where all links are alike and bytes
    rule, it would take longer.
    """
    group = replace(GROUP, devices=(0, 1, 8, 9), num_bytes=LARGE)
    found = ways_of(group, gpus(nics=1))
    assert (found.sums_whole, found.gathers_whole) == (False, False)
    assert found.nodes == ((0, 1), (8, 9))
    assert found.across == ((0, 8), (1, 9))
    alike = Link(latency_us=8, bandwidth_gb_per_s=100)
    same = gpus().model_copy(update={"links": Links(intra_node=alike, inter_node=alike)})
    assert ways_of(group, same) == group


@pytest.mark.parametrize(
    ("sizes", "goes"),
    [((19_900_000,), False), ((20_100_000,), True), ((10_100_000,) * 2, True), ((9_900_000,) * 2, False)],
)
def test_by_nodes_a_step_has_to_be_a_hundredth_of_a_second_shorter(
    sizes: tuple[int, ...], goes: bool
) -> None:
    """Of four devices on two nodes a ring takes 3/4 of the bytes over the links between them, by nodes half
    of them: at 1 GB/s 0.25 ms of 1 MB less, for a sum and a gather 0.5.
    """
    links = Links(
        intra_node=Link(latency_us=0, bandwidth_gb_per_s=10**9),
        inter_node=Link(latency_us=0, bandwidth_gb_per_s=1),
    )
    cluster = gpus(nics=1).model_copy(update={"links": links})
    groups = [
        replace(GROUP, index=index, devices=(0, 1, 8, 9), num_bytes=size, parameter_bytes=size)
        for index, size in enumerate(sizes)
    ]
    found = with_ways(groups, (), cluster, sharded=True)
    assert {bool(group.nodes) for group in found} == {goes}


def test_sums_may_be_whole_where_gathers_go_by_nodes() -> None:
    """Trees have less latency than rings inside of nodes with many hops."""
    slow_hops = Links(
        intra_node=Link(latency_us=30, bandwidth_gb_per_s=1000),
        inter_node=Link(latency_us=1, bandwidth_gb_per_s=10),
    )
    cluster = gpus(nics=1).model_copy(update={"links": slow_hops})
    group = replace(GROUP, num_bytes=64, parameter_bytes=2**31)
    found = ways_of(group, cluster)
    sum_s = spread_all_reduce_s(64, per_node(EVERYONE, cluster), cluster)
    by_s = by_node_s(64, per_node(EVERYONE, cluster), cluster)
    assert found.nodes and found.sums_whole == (sum_s < by_s) and not found.gathers_whole


@pytest.mark.parametrize(
    "changes",
    [
        {"sharding": Sharding.NONE},  # they are whole anyhow
        {"sharding": Sharding.GRADIENTS},  # passes sum them
        {"sharding": Sharding.PARAMETERS},
        {"is_trained": False},
        {"devices": (3,)},
    ],
)
def test_what_is_not_summed_and_gathered_once_a_step_in_equal_ranges_stays_as_it_is(
    changes: dict[str, object],
) -> None:
    group = replace(GROUP, **changes)  # type: ignore[arg-type]
    assert ways_of(group, gpus(nics=1)) == group


def test_where_no_state_is_shared_groups_are_summed_whole_anyhow() -> None:
    assert ways_of(GROUP, gpus(nics=1), sharded=False) == GROUP


def test_unequal_ranges_and_gloo_know_no_other_ways() -> None:
    (weighted,) = with_ways([GROUP], tuple(range(1, 65)), gpus(), sharded=True)
    assert weighted.weights and not weighted.sums_whole and not weighted.nodes
    assert ways_of(GROUP, gpus("gloo")) == GROUP


def test_what_is_summed_whole_goes_around_twice() -> None:
    net = metaop_of("a/net", 1, {1: 1.0})
    plan = plan_of(profile_of(net), cluster_of(64), [[slice_of(net, (0, 1), (0,), 0.0)]])

    def rounds(group: ParameterGroup, *, sharded: bool = True) -> dict[Collective, int]:
        found = collectives_of_step(plan, [group], sharded=sharded, clips=False, scales=False)
        return {each.kind: each.rounds for each in found if each.group is not None}

    assert rounds(GROUP) == {Collective.SUM: 1, Collective.GATHER: 1}
    assert rounds(replace(GROUP, sums_whole=True)) == {Collective.SUM: 2, Collective.GATHER: 1}
    assert rounds(replace(GROUP, gathers_whole=True)) == {Collective.SUM: 1, Collective.GATHER: 2}
    assert rounds(replace(GROUP, sums_whole=True), sharded=False) == {Collective.SUM: 2}


@pytest.mark.parametrize(
    ("sums", "gathers", "expected"),
    [(False, False, (True, True)), (True, False, (False, True)), (False, True, (True, False))],
)
def test_what_is_not_summed_whole_goes_by_nodes(
    sums: bool, gathers: bool, expected: tuple[bool, bool]
) -> None:
    net = metaop_of("a/net", 1, {1: 1.0})
    plan = plan_of(profile_of(net), cluster_of(64), [[slice_of(net, (0, 1), (0,), 0.0)]])
    group = replace(GROUP, sums_whole=sums, gathers_whole=gathers, nodes=((0, 1), (8, 9)))
    found = collectives_of_step(plan, [group], sharded=True, clips=False, scales=False)
    by_kind = {each.kind: each.by_node for each in found}
    assert (by_kind[Collective.SUM], by_kind[Collective.GATHER]) == expected
    assert not by_kind[Collective.LOSSES] and not by_kind[Collective.FLAGS]


def test_by_nodes_takes_as_long_as_the_formula_says() -> None:
    spread, cluster = per_node((0, 1, 8, 9), gpus()), gpus()
    assert parts_collective_s(LARGE, spread, 1, cluster, by_node=True) == by_node_s(LARGE, spread, cluster)
    assert parts_collective_s(LARGE, spread, 1, cluster) == spread_all_gather_s(LARGE, spread, cluster)


def test_what_goes_by_nodes_meets_inside_of_them_and_between() -> None:
    group = replace(GROUP, devices=(0, 1, 8, 9), nodes=((0, 1), (8, 9)))
    found = {
        each.ranks for each in find_communicator_ranks(64, [], [group], []) if each.purpose is Purpose.SUMS
    }
    assert found == {(0, 1, 8, 9), (0, 1), (8, 9), (0, 8), (1, 9)}


def test_the_ranks_of_a_group_know_its_ways() -> None:
    for sums, gathers in ((True, False), (False, True)):
        members = Members.of((2, 5), 5, None, replace(GROUP, sums_whole=sums, gathers_whole=gathers))
        assert (members.sums_whole, members.gathers_whole) == (sums, gathers)
        assert (members.count, members.position, members.weights) == (2, 1, ())
    assert Members.of((2, 5), 2, None) == Members(2, 0, None)


def test_groups_of_several_sets_of_devices_go_each_by_its_own_way() -> None:
    """The same bytes over two neighbours and over 57 devices."""
    pair = replace(GROUP, index=1, devices=(0, 1))
    found = with_ways([pair, replace(GROUP, devices=UNEVEN), pair], (), gpus(), sharded=True)
    assert [group.sums_whole for group in found] == [False, True, False]
    assert [group.devices for group in found] == [(0, 1), UNEVEN, (0, 1)]
