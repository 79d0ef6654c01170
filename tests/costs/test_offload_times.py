"""Which ops' activations are moved to host memory, and how long passes wait for it, solved by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.plans import cluster_of, metaop_of
from spindle_cli.costs.beyond_curve import hidden_share, spread_over, stalls
from spindle_cli.costs.shares import OpSeconds
from spindle_cli.files.cluster import Cluster, Link, NodeGroup
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import MetaOpProfile, OpMemory

GB = 10**9
LINK = Link(latency_us=0, bandwidth_gb_per_s=1)


def cluster(link: Link | None = LINK, **group: Any) -> Cluster:
    plain = cluster_of(2)
    nodes = (NodeGroup(**{"devices": 2, "device": "a800-80gb", "memory_gib": 80, **group}),)
    return plain.model_copy(update={"nodes": nodes, "links": plain.links.model_copy(update={"host": link})})


def net(num_ops: int, kept_gb: float) -> MetaOpProfile:
    """Ops that keep so much of their whole batch."""
    names = ("forward", "backward", "first_backward")
    sizes = {f"{name}_bytes": (0, 0) for name in names} | {"kept_bytes": (0, int(kept_gb * GB))}
    memory = OpMemory.model_validate(sizes)
    return metaop_of("a/m", num_ops, {1: 3.0, 2: 1.5}, memory=(memory,))


def piece(num_ops: int, offload: tuple[tuple[int, int], ...], **more: Any) -> Slice:
    keys = {"metaop": "a/m", "ops": (0, num_ops), "devices": [0], "dp": 1, "start_s": 0.0, "end_s": 1.0}
    return Slice.model_validate({**keys, "offload": offload, **more})


def waits(made: Slice, metaop: MetaOpProfile, on: Cluster | None = None) -> tuple[float, float]:
    """Of ops of 1 s forward, again 1 s and 2 s backward."""
    found = stalls(made, metaop, on or cluster(), OpSeconds(1.0, 2.0))
    return found.forward_s, found.backward_s


def test_copies_that_take_longer_than_ops_hold_up_both_passes() -> None:
    """Copies of 3 s. Out: ops start at 0, 1, 4, 7, when all but one copy have ended, and the last copy ends
    at 13. Back: ops start at 3, 6, 9, 12.
    """
    assert waits(piece(4, ((0, 4),)), net(4, 3.0)) == pytest.approx((13 - 4, 14 - 8))


def test_copies_of_a_few_ops_hide_behind_the_others() -> None:
    """Of seven ops the first and the fourth, of 3 s each; the others take 3 s backward, as they run again."""
    few = (0, 1), (3, 4)
    assert waits(piece(7, few, recompute=True), net(7, 3.0)) == (0, 0)
    # Longer: out, the fourth's copy begins when the first's has ended, and ends behind the last op; back, it
    # has the last three ops' 9 s, and the first's, from when the fourth is through, 6 s of the two between.
    assert waits(piece(7, few, recompute=True), net(7, 3.5)) == pytest.approx((0.5 + 0.5, 0))
    assert waits(piece(7, few, recompute=True), net(7, 6.5)) == pytest.approx((13.5 + 0.5 - 7, 0.5))
    # Without recomputation there are 6 s and 4 s.
    assert waits(piece(7, few), net(7, 6.0))[1] == pytest.approx(2)
    assert waits(piece(7, few), net(7, 6.5))[1] == pytest.approx(0.5 + 2.5)


def test_what_runs_again_in_part_hides_less() -> None:
    """Of seven ops the first and the fourth are moved; the others take 2.25 s backward: 6.75 and 4.5 s."""
    part = {"recompute": True, "selective": True}
    memory = net(7, 7.0).memory[0].model_copy(update={"selective_bytes": (0, 0)})
    few = net(7, 7.0).model_copy(update={"selective_share": 0.25, "memory": (memory,)})
    assert waits(piece(7, ((0, 1), (3, 4)), **part), few)[1] == pytest.approx(0.25 + 2.5)


def test_an_op_waits_for_all_copies_but_one() -> None:
    """Of the first two of five ops of 1 s: the third begins when the first's has ended."""
    assert waits(piece(5, ((0, 2),)), net(5, 1.0))[0] == 0
    assert waits(piece(5, ((0, 2),)), net(5, 2.5))[0] == pytest.approx(1.5)


def test_a_neighbours_copy_comes_while_an_op_runs_and_another_ones_when_it_is_through() -> None:
    """Of three ops, of 2 s backward and copies of 2 s; the last comes back behind nothing."""
    assert waits(piece(3, ((1, 3),)), net(3, 2.0))[1] == pytest.approx(2)
    assert waits(piece(3, ((0, 1), (2, 3))), net(3, 2.0))[1] == pytest.approx(2)
    assert waits(piece(3, ((0, 1), (2, 3))), net(3, 2.5))[1] == pytest.approx(2.5 + 0.5)


def test_the_last_op_has_nothing_to_hide_behind() -> None:
    assert waits(piece(3, ((2, 3),)), net(3, 0.5)) == pytest.approx((0.5, 0.5))
    assert waits(piece(3, ((0, 2),)), net(3, 0.5)) == (0, 0)


def test_latency_and_the_largest_share_count() -> None:
    """Of 8 samples 6 in one share: three quarters of 4 GB, and 0.5 s before the first byte."""
    slow = cluster(Link(latency_us=500_000, bandwidth_gb_per_s=1))
    uneven = {"devices": [0, 1], "dp": 2, "rows": (0, 6, 8)}
    assert waits(piece(1, ((0, 1),), **uneven), net(1, 4.0), slow) == pytest.approx((3.5, 3.5))
    assert waits(piece(1, ((0, 1),), devices=[0, 1], dp=2), net(1, 4.0), slow) == pytest.approx((2.5, 2.5))


def test_nothing_waits_without_a_link_or_without_offload() -> None:
    assert waits(piece(3, ((0, 3),)), net(3, 9.0), cluster(None)) == (0, 0)
    assert waits(piece(3, ()), net(3, 9.0)) == (0, 0)


@pytest.mark.parametrize(
    ("devices", "host_links", "sharing"),
    [(8, None, 1), (8, 8, 1), (8, 9, 1), (8, 4, 2), (8, 3, 3), (2, 1, 2)],
)
def test_devices_that_share_a_link_have_equal_parts_of_it(
    devices: int, host_links: int | None, sharing: int
) -> None:
    curve = ((1000.0, 6.0), (2000.0, 12.0))
    link = Link(latency_us=3, bandwidth_gb_per_s=12, curve=curve)
    own = cluster(link, devices=devices, host_links=host_links).host_link
    assert own is not None
    assert (own.latency_us, own.bandwidth_gb_per_s) == (3, 12 / sharing)
    assert own.curve == ((1000.0, 6 / sharing), (2000.0, 12 / sharing))


@pytest.mark.parametrize(
    ("kept_gb", "backward_s", "share"),
    [(3.0, 2.0, 1 / 3), (3.0, 0.5, 1 / 6), (1.0, 2.0, 1.0), (0.5, 2.0, 1.0)],
)
def test_so_many_ops_hide_as_their_copies_take_no_longer_than_all_ops_take(
    kept_gb: float, backward_s: float, share: float
) -> None:
    assert hidden_share(net(4, kept_gb), 1, 1, 1.0, backward_s, LINK) == pytest.approx(share)
    # The batch on two devices: half of it each.
    assert hidden_share(net(4, 2 * kept_gb), 2, 1, 1.0, backward_s, LINK) == pytest.approx(share)


def test_what_keeps_nothing_has_nothing_to_move() -> None:
    assert hidden_share(net(2, 0.0), 1, 1, 1.0, 2.0, LINK) == 0.0


@pytest.mark.parametrize(
    ("ops", "share", "ranges"),
    [
        ((0, 10), 1 / 3, ((0, 1), (3, 4), (6, 7))),
        ((2, 7), 0.5, ((2, 3), (4, 5))),
        ((2, 6), 0.5, ((2, 3),)),
        ((0, 10), 1.0, ((0, 9),)),
        ((4, 5), 1.0, ()),
        ((0, 10), 0.0, ()),
        ((0, 4), 0.33, ()),
    ],
)
def test_ops_are_spread_evenly_and_the_last_one_stays(
    ops: tuple[int, int], share: float, ranges: tuple[tuple[int, int], ...]
) -> None:
    assert spread_over(*ops, share) == ranges


@given(num_ops=st.integers(1, 60), count=st.integers(0, 60))
@examples(50)
def test_a_share_that_is_so_many_ops_gives_as_many(num_ops: int, count: int) -> None:
    """A plan's own ranges come again when its schedule is drafted anew."""
    count = min(count, num_ops - 1)
    ranges = spread_over(7, 7 + num_ops, count / max(1, num_ops - 1))
    assert sum(last - first for first, last in ranges) == count
    ops = [op for first, last in ranges for op in range(first, last)]
    assert ops == sorted(set(ops))
    assert all(7 <= op < 6 + num_ops for op in ops)
