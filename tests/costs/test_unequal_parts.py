"""Gathers of unequal parts, padded or grouped: seconds by hand, and which is faster at the limit."""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of
from spindle_cli.account.groups import with_ways
from spindle_cli.account.types import ParameterGroup
from spindle_cli.costs.links import per_node, spread_all_gather_s
from spindle_cli.costs.parameters import grouped_s, is_padded, padded_s, parts_collective_s
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.units import MIB


def three(backend: str = "nccl") -> Cluster:
    """10 us, 10 GB/s: a link carries 100,000 bytes within its latency."""
    link = Link(latency_us=10, bandwidth_gb_per_s=10)
    return Cluster(
        name="three",
        nodes=(NodeGroup(count=1, devices=3, device="a800-80gb", memory_gib=80),),
        links=Links(intra_node=link, inter_node=link),
        backend=backend,  # type: ignore[arg-type]
    )


WEIGHTS = (1, 2, 1)  # of 400,000 bytes 100,000, 200,000 and 100,000


def test_each_way_takes_as_long_as_by_hand() -> None:
    """Padded: 2 steps of 200,000 bytes, 2 x (10 + 20) us. Grouped: 4 hops and 300,000 bytes, 40 + 30 us."""
    cluster = three()
    spread = per_node((0, 1, 2), cluster)
    assert padded_s(400_000, WEIGHTS, spread, cluster) == pytest.approx(60e-6)
    assert grouped_s(400_000, WEIGHTS, spread, cluster) == pytest.approx(70e-6)
    assert parts_collective_s(400_000, spread, 1, cluster, WEIGHTS) == pytest.approx(60e-6)


def test_the_faster_way_turns_at_the_limit() -> None:
    """The largest part is longer than the mean of all but the smallest by (200 - 150) / 400 of the bytes:
    100,000 of 800,000, which a link carries within its latency.
    """
    cluster = three()
    spread = per_node((0, 1, 2), cluster)
    assert padded_s(800_000, WEIGHTS, spread, cluster) == pytest.approx(
        grouped_s(800_000, WEIGHTS, spread, cluster), rel=1e-12
    )
    assert is_padded(799_000, WEIGHTS, spread, cluster)
    assert not is_padded(801_000, WEIGHTS, spread, cluster)
    group = ParameterGroup(0, (0, 1, 2), (("w", 0),), 799_000, 801_000, (0,), (0,), (0, 1))
    (weighted,) = with_ways([group], (1, 2, 1), cluster, sharded=True)
    assert (weighted.weights, weighted.pads_sum, weighted.pads_gather) == ((1, 2, 1), True, False)
    # Parts that are equal among these, and what all step whole, stay as they were.
    (even,) = with_ways([group], (7, 7, 7), cluster, sharded=True)
    assert even == group
    whole = ParameterGroup(0, (0, 1, 2), (("w", 0),), 1, 1, (0,), (0,), (0, 1), sharding=Sharding.NONE)
    assert with_ways([whole], (1, 2, 1), cluster, sharded=True) == (whole,)


def test_equal_parts_and_those_of_two_devices_are_padded() -> None:
    cluster = three()
    pair, spread = per_node((0, 1), cluster), per_node((0, 1, 2), cluster)
    for num_bytes in (1.0, 1e7):
        assert is_padded(num_bytes, (1, 9), pair, cluster)
        assert is_padded(num_bytes, (1, 1, 1), spread, cluster)
    assert padded_s(3e6, (1, 1, 1), spread, cluster) == spread_all_gather_s(3e6, spread, cluster)


def test_what_is_large_is_never_padded() -> None:
    """Of two devices with 1 and 3 of 4 parts a copy has 3/2 of the bytes: at 32 MiB x 2/3 it is the limit."""
    cluster = three()
    pair = per_node((0, 1), cluster)
    assert is_padded(64 * MIB / 3, (1, 3), pair, cluster)
    assert not is_padded(64 * MIB / 3 + 1, (1, 3), pair, cluster)
    large = parts_collective_s(64 * MIB, pair, 1, cluster, (1, 3))
    assert large == pytest.approx(20e-6 + 48 * MIB / 10e9)
    assert large == grouped_s(64 * MIB, (1, 3), pair, cluster)


def test_gloo_has_no_call_to_save() -> None:
    """Its equal gather is a broadcast from each: 2 hops and 300,000 bytes."""
    cluster = three("gloo")
    spread = per_node((0, 1, 2), cluster)
    assert grouped_s(400_000, WEIGHTS, spread, cluster) == pytest.approx(50e-6)
    assert not is_padded(1.0, WEIGHTS, spread, cluster)
    assert not is_padded(1.0, (1, 9), per_node((0, 1), cluster), cluster)


def test_a_sum_that_all_get_has_no_parts() -> None:
    cluster = cluster_of(2)
    spread = per_node((0, 1), cluster)
    assert parts_collective_s(1e6, spread, 2, cluster, (1, 9)) == parts_collective_s(1e6, spread, 2, cluster)
