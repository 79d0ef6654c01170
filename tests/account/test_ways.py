"""Which groups are summed and gathered as a whole, though each device needs a range, and what that moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.sums.collectives import collectives_of_step
from spindle_cli.account.sums.ways import with_ways
from spindle_cli.account.types import Collective, ParameterGroup
from spindle_cli.costs.links import is_faster_summed, per_node
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.runtime.communication.collectives import Members


def gpus(backend: str = "nccl") -> Cluster:
    """8 nodes of 8."""
    return Cluster(
        name="gpus",
        nodes=(NodeGroup(count=8, devices=8, device="a800-80gb", memory_gib=80),),
        links=Links(
            intra_node=Link(latency_us=8, bandwidth_gb_per_s=100),
            inter_node=Link(latency_us=14, bandwidth_gb_per_s=10),
        ),
        backend=backend,  # type: ignore[arg-type]
    )


EVERYONE = tuple(range(64))
SMALL, LARGE = 2**16, 2**30
GROUP = ParameterGroup(0, EVERYONE, (("net", 0),), SMALL, LARGE, (0,), (0,), (0, 1))


def ways_of(group: ParameterGroup, cluster: Cluster | None = None) -> tuple[bool, bool]:
    (found,) = with_ways([group], (), cluster or gpus())
    assert replace(found, sums_whole=False, gathers_whole=False) == group
    return found.sums_whole, found.gathers_whole


def test_each_collective_of_a_group_goes_the_way_that_is_faster_for_its_bytes() -> None:
    assert is_faster_summed(SMALL, per_node(EVERYONE, gpus()), gpus())
    assert not is_faster_summed(LARGE, per_node(EVERYONE, gpus()), gpus())
    assert ways_of(GROUP) == (True, False)
    assert ways_of(replace(GROUP, num_bytes=LARGE, parameter_bytes=SMALL)) == (False, True)
    assert ways_of(replace(GROUP, num_bytes=LARGE)) == (False, False)
    # Of two neighbours a ring has one hop.
    assert ways_of(replace(GROUP, devices=(0, 1))) == (False, False)


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
    assert ways_of(replace(GROUP, **changes)) == (False, False)  # type: ignore[arg-type]


def test_unequal_ranges_and_gloo_know_no_sums_of_everything() -> None:
    (weighted,) = with_ways([GROUP], tuple(range(1, 65)), gpus())
    assert weighted.weights and not weighted.sums_whole
    assert ways_of(GROUP, gpus("gloo")) == (False, False)


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


def test_the_ranks_of_a_group_know_its_ways() -> None:
    for sums, gathers in ((True, False), (False, True)):
        members = Members.of((2, 5), 5, None, replace(GROUP, sums_whole=sums, gathers_whole=gathers))
        assert (members.sums_whole, members.gathers_whole) == (sums, gathers)
        assert (members.count, members.position, members.weights) == (2, 1, ())
    assert Members.of((2, 5), 2, None) == Members(2, 0, None)


def test_groups_of_several_sets_of_devices_go_each_by_its_own_way() -> None:
    """The same bytes over two neighbours and over 64 devices."""
    pair = replace(GROUP, index=1, devices=(0, 1))
    found = with_ways([pair, GROUP, pair], (), gpus())
    assert [group.sums_whole for group in found] == [False, True, False]
    assert [group.devices for group in found] == [(0, 1), EVERYONE, (0, 1)]
