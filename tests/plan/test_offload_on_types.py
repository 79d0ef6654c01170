"""Plans for several types of device move activations to host memory as far as that hides behind compute."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from estimates import estimated
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.offloaded import moved
from helpers.offloaded import sound as sound_within
from helpers.several_types import metaop_on_types, profile_on_types
from spindle_cli.costs.beyond_curve import hidden_on, links_of_shares, spread_over
from spindle_cli.costs.shares import OpSeconds
from spindle_cli.errors import UsageError
from spindle_cli.files.cluster import Cluster, GroupLinks, Link, Links, NodeGroup
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.ordering.orders import mirrored
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.search.evaluate import measure_as_they_are
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.profile.types import MetaOpProfile, OpMemory, Profile
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


def hidden(
    metaop: MetaOpProfile,
    on: Cluster,
    times_s: tuple[float, float],
    rows: tuple[int, ...] | None,
    devices: tuple[int, ...],
    tp: int = 1,
) -> float:
    """Of its ops on these devices, the share whose copies hide."""
    keys = {"metaop": metaop.name, "ops": (0, 4), "devices": devices, "dp": len(devices) // tp, "tp": tp}
    piece = Slice.model_validate(keys | {"rows": rows, "start_s": 0.0, "end_s": 1.0})
    return hidden_on(piece, metaop, OpSeconds(*times_s), links_of_shares(piece, on))


def test_of_an_allocation_so_much_hides_as_on_its_least_favourable_share() -> None:
    """Of 8 GB the fast device has 6 of 8 samples, copied in 3 s, the slow one 2 in 4 s."""
    metaop = metaop_on_types("t/net", 4, {FAST: 1.0, SLOW: 3.0}, memory=kept(8 * GB))
    on = cluster(2.0, 0.5, devices=2)
    found = (
        hidden(metaop, on, (1.0, 2.0), (0, 6, 8), (0, 2)),
        hidden(metaop, on, (2.0, 0.8), (0, 6, 8), (0, 2)),
        hidden(metaop, on, (1.0, 2.0), None, (0, 2)),  # 4 samples each: 2 s and 8 s
        hidden(metaop, on, (1.0, 2.0), None, (0,)),  # all on the fast one: 4 s
        hidden(metaop, on, (9.0, 9.0), None, (0,)),
        hidden(metaop, on, (1.0, 2.0), (0, 2, 7, 8), (0, 1, 2)),  # 5 on the second fast one: 2.5 s
    )
    assert found == pytest.approx((1 / 4, 0.8 / 4, 1 / 8, 1 / 4, 1.0, 1 / 2.5))


def test_tensor_parallel_groups_are_one_share_and_a_type_without_a_link_hides_nothing() -> None:
    memory = tuple(entry.model_copy(update={"tp": 2}) for entry in kept(8 * GB))
    metaop = metaop_on_types("t/net", 4, {FAST: 1.0, SLOW: 3.0}, memory=memory)
    one, other = cluster(2.0, 0.5, devices=2), cluster(2.0, None, devices=2)
    pairs, fast = ((0, 6, 8), (0, 1, 2, 3), 2), (None, (0, 1), 2)
    assert hidden(metaop, one, (1.0, 2.0), *pairs) == pytest.approx(1 / 4)
    assert hidden(metaop, other, (1.0, 2.0), *pairs) == 0.0
    assert hidden(metaop, other, (1.0, 2.0), *fast) == pytest.approx(1 / 4)


def test_what_hides_is_moved_and_less_is_recomputed() -> None:
    """12 ops keep 2 GB; 7.75 GiB on each of two devices have no room for 12 and 12."""
    profile = profile_on_types(net())
    without = sound(make_plan(profile, cluster(None, None)), profile)
    slow_link = sound(make_plan(profile, cluster(0.5, 0.25)), profile)
    fast_link = sound(make_plan(profile, cluster(50.0, 50.0)), profile)
    assert moved(without)[0] == 0 < moved(without)[1]
    assert moved(slow_link)[0] > 0
    assert moved(slow_link)[1] < moved(without)[1]
    assert moved(fast_link)[0] > 0 == moved(fast_link)[1]
    assert fast_link.predicted.iteration_s < slow_link.predicted.iteration_s < without.predicted.iteration_s
    assert any("in host memory" in note for note in fast_link.notes)
    assert all(size > 0 for size in fast_link.predicted.host_memory_bytes)


def test_curves_of_more_devices_than_there_are_keep_nothing_from_being_moved() -> None:
    """What devices of several types take is known by shares, whatever the curve of one type begins with."""
    metaop = net()
    wide = tuple(point for point in metaop.curve if point.num_devices > 2)
    assert {point.device for point in wide} == set(BOTH)
    of_all, of_wide = (
        make_plan(profile_on_types(each), cluster(50.0, 50.0))
        for each in (metaop, metaop.model_copy(update={"curve": wide}))
    )
    assert moved(of_wide) == moved(of_all)
    assert moved(of_wide)[0] > 0
    assert of_wide.predicted.iteration_s == of_all.predicted.iteration_s


def test_other_strategies_move_what_hides_in_the_place_of_recomputing() -> None:
    profile = profile_on_types(net())
    without, fast_link = (
        sound(make_plan(profile, cluster(speed, speed), "sequential"), profile) for speed in (None, 50.0)
    )
    assert moved(fast_link)[0] > 0
    assert moved(fast_link)[1] < moved(without)[1]
    assert fast_link.predicted.iteration_s < without.predicted.iteration_s
    assert any("in host memory and recomputed" in note for note in fast_link.notes)


def test_it_is_left_where_the_user_says_so_and_where_all_fits() -> None:
    profile = profile_on_types(net())
    without = make_plan(profile, cluster(None, None))
    left = make_plan(profile, cluster(50.0, 50.0), offload=False)
    assert left.slices == without.slices
    assert left.cluster == cluster(50.0, 50.0)
    request = make_plan(profile, cluster(50.0, 50.0), offload=True)
    assert request == make_plan(profile, cluster(50.0, 50.0))
    assert moved(make_plan(profile, cluster(50.0, 50.0, memory_gib=40))) == (0, 0)
    with pytest.raises(UsageError, match="does not say how fast its devices reach host memory"):
        make_plan(profile, cluster(None, None), offload=True)


def test_devices_without_a_link_keep_theirs() -> None:
    profile = profile_on_types(net())
    plan = sound(make_plan(profile, cluster(50.0, None)), profile)
    for piece in plan.slices:
        assert not piece.offload or piece.devices == (0,)


@pytest.mark.parametrize("limits", [(8.0, 4.0), (8.0, 2.5), (5.0, 8.0)])
def test_no_node_gets_more_than_it_has_room_for(limits: tuple[float, float]) -> None:
    profile = profile_on_types(net())
    on = cluster(50.0, 50.0, host_memory_gib=dict(zip((FAST, SLOW), limits, strict=True)))
    plan = sound(make_plan(profile, on), profile)
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
    without = make_plan(profile, cluster(None, None, memory_gib=memory))
    plan = sound(make_plan(profile, cluster(fast, slow, memory_gib=memory)), profile)
    assert plan.predicted.iteration_s <= without.predicted.iteration_s


@pytest.mark.parametrize(
    ("links", "rows", "devices"),
    [
        ((1.0, 0.25), None, (0,)),
        ((1.0, 0.25), None, (1,)),
        ((1.0, 0.25), (0, 4, 6), (0, 1)),
        ((0.3, 1.0), (0, 4, 6), (0, 1)),  # the fast device has most to copy, and the slower link
        ((50.0, 2.0), (0, 4, 6), (0, 1)),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_moved_on_types_is_estimated_as_predicted(
    links: tuple[float, float], rows: tuple[int, ...] | None, devices: tuple[int, ...], *, recompute: bool
) -> None:
    metaop = net()
    problem = make_problem(profile_on_types(metaop), cluster(*links, memory_gib=60))
    keys = {"metaop": metaop.name, "ops": (0, 12), "devices": devices, "dp": len(devices), "rows": rows}
    piece = Slice.model_validate(keys | {"recompute": recompute, "start_s": 0.0, "end_s": 1.0})
    op_s = problem.op_s_of(piece.model_copy(update={"recompute": False}))
    share = hidden_on(piece, metaop, OpSeconds(*op_s), links_of_shares(piece, problem.cluster))
    moving = piece.model_copy(update={"offload": spread_over(0, 12, share)})
    begun = measure_as_they_are(problem, "by hand", timed(problem, [moving], mirrored([0])))
    assert begun is not None and any(need.host_bytes > 0 for need in begun.memory)
    seconds, filled = estimated(problem, begun)
    assert seconds == pytest.approx(begun.prediction.iteration_s, rel=1e-6)
    assert [filled[device] for device in devices] == pytest.approx([1.0] * len(devices), rel=1e-3)
