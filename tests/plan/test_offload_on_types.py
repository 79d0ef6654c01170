"""Plans for several types of device move activations to host memory as far as that hides behind compute."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.offloaded import moved
from helpers.offloaded import sound as sound_within
from helpers.several_types import metaop_on_types, profile_on_types
from spindle_cli.errors import UsageError
from spindle_cli.files.cluster import Cluster, GroupLinks, Link, Links, NodeGroup
from spindle_cli.plan.cutting.allocations import allocations, moving
from spindle_cli.plan.cutting.hidden import hidden_shares
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.mixed.bound import mixed_bound
from spindle_cli.plan.mixed.posed import SeveralTypes
from spindle_cli.plan.mixed.problem import make_mixed_problem
from spindle_cli.plan.problem import MemoryFallback, Point, with_offload
from spindle_cli.plan.search.memory_fallback import (
    given_up,
    hidden_of_types,
    host_room,
)
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, OpMemory, Profile
from spindle_cli.units import GIB, MIB

GB = 10**9
FAST, SLOW = "a100-80gb", "v100-32gb"
BOTH = FAST, SLOW


def cluster(
    fast: float | None,
    slow: float | None,
    memory_gib: float = 7.75,
    devices: int = 1,
    host_memory_gib: Mapping[str, float] | None = None,
    count: int = 1,
) -> Cluster:
    """Nodes of each type whose devices have links of so many GB/s to their memory."""
    own = {FAST: fast, SLOW: slow}
    nodes = tuple(
        NodeGroup(
            count=count if kind == FAST else 1,
            devices=devices,
            device=kind,
            memory_gib=memory_gib,
            reserve_gib=0,
            host_memory_gib=(host_memory_gib or {}).get(kind),
            links=None if speed is None else GroupLinks(host=Link(latency_us=0, bandwidth_gb_per_s=speed)),
        )
        for kind, speed in own.items()
    )
    link = Link(latency_us=0, bandwidth_gb_per_s=1000)
    return Cluster(name="two", nodes=nodes, links=Links(intra_node=link, inter_node=link))


def kept(all_bytes: int) -> tuple[OpMemory, ...]:
    """Of ops that keep so many bytes of the whole batch."""
    names = ("forward", "backward", "first_backward")
    sizes = {f"{name}_bytes": (0, 0) for name in names} | {"kept_bytes": (0, all_bytes)}
    return (OpMemory.model_validate(sizes),)


def selectable(metaop: MetaOpProfile) -> MetaOpProfile:
    """The same; a quarter of an op's forward pass may run again for all that it keeps."""
    (memory,) = kept(metaop.activation_bytes_per_op)
    known = memory.model_copy(update={"selective_bytes": (0, 0)})
    return metaop.model_copy(update={"selective_share": 0.25, "memory": (known,)})


def net(
    name: str = "t/net", num_ops: int = 12, kept_bytes: int = 2 * GB, fast_s: float = 0.5
) -> MetaOpProfile:
    """Ops that keep so many bytes of a batch of 6 and hand on 1 MiB; slow ones take twice as long."""
    return metaop_on_types(
        name,
        num_ops,
        {FAST: fast_s, SLOW: 2 * fast_s},
        batch_size=6,
        activation_bytes_per_op=kept_bytes,
        inner_output_bytes=MIB,
    )


def sound(plan: Plan, profile: Profile) -> Plan:
    return sound_within(plan, profile, within=0.03)


def both(
    forward_s: float, backward_s: float, rows: tuple[int, ...] | None, counts: tuple[int, int], tp: int = 1
) -> Point:
    dp = sum(counts) // tp
    return Point(sum(counts), dp, tp, forward_s, backward_s, forward_s + backward_s, counts=counts, rows=rows)


def test_of_an_allocation_so_much_hides_as_on_its_least_favourable_share() -> None:
    """Of 8 GB the fast device has 6 of 8 samples, copied in 3 s, the slow one 2 in 4 s."""
    metaop = metaop_on_types("t/net", 4, {FAST: 1.0, SLOW: 3.0}, memory=kept(8 * GB))
    on = cluster(2.0, 0.5)
    points = (
        both(1.0, 2.0, (0, 6, 8), (1, 1)),
        both(2.0, 0.8, (0, 6, 8), (1, 1)),
        both(1.0, 2.0, None, (1, 1)),  # 4 samples each: 2 s and 8 s
        both(1.0, 2.0, None, (1, 0)),  # all on the fast one: 4 s
        both(9.0, 9.0, None, (1, 0)),
        both(1.0, 2.0, (0, 2, 7, 8), (2, 1)),  # 5 on the second fast one: 2.5 s; 2 s on the slow one
    )
    assert hidden_shares(points, metaop, on) == pytest.approx((1 / 4, 0.8 / 4, 1 / 8, 1 / 4, 1.0, 1 / 2.5))


def test_tensor_parallel_groups_are_one_share_and_a_type_without_a_link_hides_nothing() -> None:
    memory = tuple(entry.model_copy(update={"tp": 2}) for entry in kept(8 * GB))
    metaop = metaop_on_types("t/net", 4, {FAST: 1.0, SLOW: 3.0}, memory=memory)
    pairs = both(1.0, 2.0, (0, 6, 8), (2, 2), 2)
    assert hidden_shares((pairs,), metaop, cluster(2.0, 0.5)) == pytest.approx((1 / 4,))
    fast = both(1.0, 2.0, None, (2, 0), 2)
    assert hidden_shares((pairs, fast), metaop, cluster(2.0, None)) == pytest.approx((0.0, 1 / 4))


def test_moved_ops_are_not_recomputed_and_the_fastest_allocation_stays_last() -> None:
    """Of two, the slower one that hides all is the faster one then: 1 + 3 instead of 1.5 + 4.5."""
    slow = Point(1, 1, 1, 1.0, 4.0, 5.0, again=1.0, counts=(0, 1))
    fast = Point(1, 1, 1, 1.5, 3.0, 4.5, again=1.0, counts=(1, 0))
    found = moving((slow, fast), 0.9, (1.0, 0.2))
    assert [point.counts for point in found] == [(1, 0), (0, 1)]
    assert [point.offload for point in found] == [0.2, 0.9]
    assert [point.op_s for point in found] == pytest.approx([4.5 - 0.2 * 1.5, 5.0 - 0.9])
    plain = (Point(1, 1, 1, 1.0, 3.0, 4.0, counts=(0, 1)), Point(1, 1, 1, 1.0, 2.0, 3.0, counts=(1, 0)))
    assert moving(plain, 0.5, (1.0, 0.2)) == (with_offload(plain[0], 0.5), with_offload(plain[1], 0.2))


def test_a_problem_moves_what_its_fallback_says_as_far_as_it_hides() -> None:
    """Ops keep 2 GB, which a fast device does in 1 s forward and copies in 2; a slow one takes 2 and copies
    in 8.
    """
    on, fallback = cluster(1.0, 0.25), MemoryFallback(recompute={"t/net": 5}, offload={"t/net": 0.4})
    first, second = make_mixed_problem(profile_on_types(net()), on, fallback).nodes
    for node, forwards in ((first, 2), (second, 1)):
        of = {point.counts: point for point in node.points}
        assert of[1, 0].offload == pytest.approx(0.4)
        assert of[0, 1].offload == pytest.approx(0.25)
        again_s = (forwards - 1) * (1 - 0.4)
        assert of[1, 0].op_s == pytest.approx(3 + again_s)
        assert node.points[-1].op_s == min(point.op_s for point in node.points)
    none = make_mixed_problem(profile_on_types(net()), on.without_host_link(), fallback)
    assert all(point.offload == 0 for node in none.nodes for point in node.points)


def test_what_is_recomputed_hides_no_more_than_what_is_not() -> None:
    """Backward takes half as long as forward: 0.5 s, in which a quarter of the copies of 2 s hides."""
    swapped = [
        each.model_copy(update={"forward_s": 2 * each.forward_s, "backward_s": each.backward_s / 2})
        for each in net().shares
    ]
    metaop = net().model_copy(update={"shares": tuple(swapped)})
    fallback = MemoryFallback(recompute={"t/net": 12}, offload={"t/net": 1.0})
    (node,) = make_mixed_problem(profile_on_types(metaop), cluster(0.5, 0.5), fallback).nodes
    of = {point.counts: point for point in node.points}
    # All 6 samples: 2 s and 1 s on the fast device, copies of 2 GB take 4 s.
    assert of[1, 0].offload == pytest.approx(1 / 4)


def test_the_links_of_another_cluster_of_the_same_nodes_have_shares_of_their_own() -> None:
    posing, profile = SeveralTypes(), profile_on_types(net())
    fallback = MemoryFallback(offload={"t/net": 1.0})
    found = []
    for on in (cluster(1.0, 0.25), cluster(0.5, 0.25), cluster(1.0, 0.25).with_host_links_of((SLOW,))):
        (node,) = posing.posed(profile, on, fallback).problem.nodes
        found.append(next(point.offload for point in node.points if point.counts == (1, 0)))
    assert found == pytest.approx([0.5, 0.25, 0.0])


def test_most_counts_for_what_is_moved_and_least_for_what_that_saves() -> None:
    """Of ops that keep 1 GB half hides on fast devices, a quarter on slow ones: of 8 GB to save 4, as much as
    hides anywhere is moved, which saves 2 for sure; 2 more take 3 ops of which 3/4 stay.
    """
    metaop = net("t/net", 8, GB + MIB, 0.25)
    profile, on = profile_on_types(metaop), cluster(1.0, 0.25)
    assert hidden_of_types(metaop, on) == pytest.approx((0.5, 0.25), rel=2e-3)
    assert given_up(profile, on, 0.2) == MemoryFallback(offload={"t/net": pytest.approx(0.2)})
    half = given_up(profile, on, 0.5)
    assert half.offload == {"t/net": pytest.approx(0.5, rel=2e-3)}
    assert half.recompute == {"t/net": 3}
    most = given_up(profile, on, 1.0)
    assert (most.recompute, most.offload) == ({"t/net": 8}, {"t/net": pytest.approx(0.5, rel=2e-3)})
    assert hidden_of_types(metaop, cluster(1.0, None)) == pytest.approx((0.5, 0), rel=2e-3)
    assert given_up(profile, cluster(None, None), 0.5) == MemoryFallback(recompute={"t/net": 4})


def test_nodes_are_to_hold_what_their_types_do_of_all() -> None:
    """Two fast nodes to a slow one, whose device is half as fast: 4/5 of all are on the fast ones."""
    room = [
        host_room([net()], cluster(1, 1, count=2, host_memory_gib=limits)) / GIB
        for limits in ({FAST: 4}, {SLOW: 4}, {FAST: 4, SLOW: 4}, {FAST: 4, SLOW: 1})
    ]
    assert room == pytest.approx([0.8 * 2 * 4 / 0.8, 0.8 * 4 / 0.2, 8.0, 0.8 * 1 / 0.2])
    assert host_room([net()], cluster(1, 1)) == inf


def test_no_schedule_with_ops_moved_ends_before_the_bound_and_one_op_after_another_reaches_it() -> None:
    """Half of the ops that would be recomputed are moved, on all allocations."""
    profile, on = profile_on_types(selectable(net(kept_bytes=GB // 2))), cluster(1.0, 1.0)
    counts = {"t/net": 12}
    bounds = []
    for fallback in (
        MemoryFallback(),
        MemoryFallback(recompute=counts, offload={"t/net": 0.5}),
        MemoryFallback(recompute=counts),
        MemoryFallback(selective=counts),
        MemoryFallback(selective=counts, offload={"t/net": 0.5}),
    ):
        problem = make_mixed_problem(profile, on, fallback)
        (node,) = problem.nodes
        bounds.append(mixed_bound(problem, fallback).lower_bound_s)
        assert bounds[-1] == pytest.approx(12 * node.points[-1].op_s, rel=1e-3)
    # A third of the time is forward: once more for half of the ops, and for all; a quarter of it for either.
    shares = [0, 1 / 2, 1, 1 / 4, 1 / 8]
    assert bounds == pytest.approx([12 * 2.0 * (1 + share / 3) for share in shares], rel=1e-3)


def test_a_little_more_than_a_step_of_what_is_moved_counts_as_the_next_step() -> None:
    profile, on = profile_on_types(net(kept_bytes=GB // 2)), cluster(1.0, 1.0)
    for share, steps in ((8 / 16, 8), (8.1 / 16, 9), (9 / 16, 9)):
        fallback = MemoryFallback(recompute={"t/net": 12}, offload={"t/net": share})
        bound = mixed_bound(make_mixed_problem(profile, on, fallback), fallback)
        assert bound.lower_bound_s == pytest.approx(24.0 * (1 + (1 - steps / 16) / 3), rel=1e-3)


def test_what_hides_is_moved_and_less_is_recomputed() -> None:
    """12 ops keep 2 GB; 7.75 GiB on each of two devices have no room for 12 and 12."""
    profile = profile_on_types(net())
    without = sound(make_plan(profile, cluster(None, None), effort=0), profile)
    slow_link = sound(make_plan(profile, cluster(0.5, 0.25), effort=0), profile)
    fast_link = sound(make_plan(profile, cluster(50.0, 50.0), effort=0), profile)
    assert moved(without)[0] == 0 < moved(without)[1]
    assert moved(slow_link)[0] > 0
    assert moved(slow_link)[1] < moved(without)[1]
    assert moved(fast_link)[0] > 0 == moved(fast_link)[1]
    assert fast_link.predicted.iteration_s < slow_link.predicted.iteration_s < without.predicted.iteration_s
    assert any("in host memory" in note for note in fast_link.notes)
    assert all(size > 0 for size in fast_link.predicted.host_memory_bytes)


def test_it_is_left_where_the_user_says_so_and_where_all_fits() -> None:
    profile = profile_on_types(net())
    without = make_plan(profile, cluster(None, None), effort=0)
    left = make_plan(profile, cluster(50.0, 50.0), effort=0, offload=False)
    assert left.slices == without.slices
    assert left.cluster == cluster(50.0, 50.0)
    asked = make_plan(profile, cluster(50.0, 50.0), effort=0, offload=True)
    assert asked == make_plan(profile, cluster(50.0, 50.0), effort=0)
    assert moved(make_plan(profile, cluster(50.0, 50.0, memory_gib=40), effort=0)) == (0, 0)
    with pytest.raises(UsageError, match="does not say how fast its devices reach host memory"):
        make_plan(profile, cluster(None, None), offload=True)


def test_devices_without_a_link_keep_theirs() -> None:
    profile = profile_on_types(net())
    plan = sound(make_plan(profile, cluster(50.0, None), effort=0), profile)
    for piece in plan.slices:
        assert not piece.offload or piece.devices == (0,)


@pytest.mark.parametrize("limits", [(8.0, 4.0), (8.0, 2.5), (5.0, 8.0)])
def test_no_node_gets_more_than_it_has_room_for(limits: tuple[float, float]) -> None:
    profile = profile_on_types(net())
    on = cluster(50.0, 50.0, host_memory_gib=dict(zip((FAST, SLOW), limits, strict=True)))
    plan = sound(make_plan(profile, on, effort=0), profile)
    taken = plan.predicted.host_memory_bytes
    assert all(0 < size <= limit * GIB for size, limit in zip(taken, limits, strict=True))


@pytest.mark.long
@given(
    fast=st.sampled_from([0.01, 0.5, 2.0, 50.0]),
    slow=st.sampled_from([0.01, 0.5, 50.0]),
    memory=st.sampled_from([5, 7, 9]),
)
@examples(5)
def test_links_to_host_memory_never_make_a_plan_slower(fast: float, slow: float, memory: int) -> None:
    profile = profile_on_types(net(), net("u/net", 4, GB))
    without = make_plan(profile, cluster(None, None, memory_gib=memory), effort=0)
    plan = sound(make_plan(profile, cluster(fast, slow, memory_gib=memory), effort=0), profile)
    assert plan.predicted.iteration_s <= without.predicted.iteration_s


def test_allocations_know_what_hides_on_them_by_the_type_that_they_take() -> None:
    """On all allocations of a MetaOp, over one link for both: a slow device hides twice as much."""
    metaop, on = net(), cluster(0.5, 0.5)
    points = allocations(metaop, on)
    hidden = dict(zip((point.counts for point in points), hidden_shares(points, metaop, on), strict=True))
    assert (hidden[1, 0], hidden[0, 1]) == pytest.approx((1 / 4, 1 / 2))


def test_of_ops_that_recompute_in_part_those_that_are_split_move_nothing() -> None:
    """Split allocations are left out, and with them the shares that hide on them: a quarter of a copy of 2 s
    on the slow device, all on the fast one.
    """
    on = cluster(2.0, 0.25, devices=2)
    whole = selectable(net(kept_bytes=2 * GB))
    split = CurvePoint(
        num_devices=2, dp=1, tp=2, forward_s=0.1, backward_s=0.2, source="measured", device=FAST
    )
    profile = profile_on_types(whole)
    metaop = profile.by_name["t/net"]
    with_split = profile.with_metaops([metaop.model_copy(update={"curve": (*metaop.curve, split)})])
    fallback = MemoryFallback(selective={"t/net": 12}, offload={"t/net": 0.5})
    for each in (profile, with_split):
        (node,) = make_mixed_problem(each, on, fallback).nodes
        assert {point.tp for point in node.points} == {1}
        of = {point.counts: point.offload for point in node.points}
        assert of[1, 0] == pytest.approx(0.5)
        assert of[0, 1] == pytest.approx(0.25)
