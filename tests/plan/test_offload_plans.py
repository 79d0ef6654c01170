"""Where memory is short, activations are moved to host memory as far as that hides behind compute."""

from __future__ import annotations

from typing import Any

import pytest
from estimates import estimated
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.offloaded import moved
from helpers.offloaded import sound as sound_within
from helpers.plans import SELECTIVE, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.check.run import check_plan
from spindle_cli.costs.beyond_curve import Again, spread_over, stalls
from spindle_cli.costs.shares import OpSeconds
from spindle_cli.errors import UsageError
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.ordering.orders import mirrored
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.placing.passes import _stalls
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import MemoryFallback
from spindle_cli.plan.search.evaluate import measure_as_they_are
from spindle_cli.plan.search.memory_fallback import describe
from spindle_cli.plan.sets.choose import evaluate_in_turn
from spindle_cli.plan.sets.restrict import as_early_as_possible
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.profile.types import MetaOpProfile, Profile, TaskShare
from spindle_cli.simulate.run import simulate
from spindle_cli.simulate.types import Activity
from spindle_cli.units import GIB, MIB

GB = 10**9


def cluster(
    speed: float | None, memory_gib: float = 9.0, num_devices: int = 1, host_memory_gib: float | None = None
) -> Cluster:
    """GPUs of a node, each with a link of so many GB/s to host memory."""
    group = NodeGroup(
        devices=num_devices,
        device="a800-80gb",
        memory_gib=memory_gib,
        reserve_gib=0,
        host_memory_gib=host_memory_gib,
    )
    link = Link(latency_us=0, bandwidth_gb_per_s=100)
    host = None if speed is None else Link(latency_us=0, bandwidth_gb_per_s=speed)
    return Cluster(name="gpus", nodes=(group,), links=Links(intra_node=link, inter_node=link, host=host))


def net(name: str = "a/m", num_ops: int = 12, kept: int = GB, forward_s: float = 1.0) -> MetaOpProfile:
    """Ops that keep so many bytes and hand on 1 MiB; twice as long backward."""
    return metaop_of(name, num_ops, {1: 3 * forward_s}, activation_bytes_per_op=kept, inner_output_bytes=MIB)


def sound(plan: Plan, profile: Profile) -> Plan:
    return sound_within(plan, profile, within=1e-6)


def test_what_hides_is_moved_and_nothing_is_recomputed() -> None:
    """12 ops of 1 s forward keep 1 GB each, which 9 GiB have no room for; a copy takes 0.9 s."""
    profile = profile_of(net())
    without = sound(make_plan(profile, cluster(None)), profile)
    fast = sound(make_plan(profile, cluster(1.1)), profile)
    assert moved(without)[0] == 0 < moved(without)[1]
    assert moved(fast)[0] > 0 == moved(fast)[1]
    assert fast.predicted.iteration_s == pytest.approx(36, rel=1e-3)
    assert fast.predicted.iteration_s < without.predicted.iteration_s
    assert f"Memory asks for activations of {moved(fast)[0]} ops in host memory." in fast.notes
    # In blocks of 2 MiB.
    assert fast.predicted.host_memory_bytes == (moved(fast)[0] * 477 * 2 * MIB,)


def test_a_slow_link_takes_what_hides_and_the_rest_is_recomputed() -> None:
    """A copy takes 4 s: every fourth op is moved."""
    profile = profile_of(net(num_ops=24))
    tight = {"memory_gib": 12.0}
    without = sound(make_plan(profile, cluster(None, **tight)), profile)
    slow = sound(make_plan(profile, cluster(0.25, **tight)), profile)
    assert moved(slow)[0] in (4, 5)
    assert 0 < moved(slow)[1] < moved(without)[1]
    assert slow.predicted.iteration_s < without.predicted.iteration_s
    assert any("host memory and recomputed activations" in note for note in slow.notes)


def test_with_room_for_all_nothing_is_moved() -> None:
    profile = profile_of(net())
    roomy = make_plan(profile, cluster(1.1, memory_gib=40))
    assert moved(roomy) == (0, 0)
    assert roomy.predicted.host_memory_bytes == ()


def test_it_is_left_where_the_user_says_so_and_refused_where_nothing_is_known_of_the_link() -> None:
    profile = profile_of(net())
    without = make_plan(profile, cluster(None))
    left = make_plan(profile, cluster(1.1), offload=False)
    assert left.slices == without.slices
    assert left.cluster == cluster(1.1)
    assert make_plan(profile, cluster(1.1), offload=True) == make_plan(profile, cluster(1.1))
    with pytest.raises(UsageError, match="does not say how fast its devices reach host memory"):
        make_plan(profile, cluster(None), offload=True)


@given(speed=st.sampled_from([0.001, 0.05, 0.3, 0.5, 0.9, 2.0, 50.0]), memory=st.sampled_from([4, 5, 7, 9]))
@examples(6)
def test_a_link_to_host_memory_never_makes_a_plan_slower(speed: float, memory: int) -> None:
    profile = profile_of(net(), net("b/m", 4, 2 * GB, 0.5))
    without = make_plan(profile, cluster(None, memory_gib=memory))
    plan = sound(make_plan(profile, cluster(speed, memory_gib=memory)), profile)
    assert plan.predicted.iteration_s <= without.predicted.iteration_s


@pytest.mark.parametrize("host_memory_gib", [0.5, 2.0, 4.0])
def test_a_node_gets_no_more_than_it_has_room_for(host_memory_gib: float) -> None:
    profile = profile_of(net())
    plan = sound(make_plan(profile, cluster(1.1, memory_gib=5, host_memory_gib=host_memory_gib)), profile)
    assert sum(plan.predicted.host_memory_bytes) <= host_memory_gib * GIB
    if host_memory_gib > 2:
        assert moved(plan)[0] > 0


def test_a_plan_says_what_it_has_moved_once_for_all_micro_batches() -> None:
    keys = {"metaop": "a/m", "ops": (0, 4), "devices": [0], "dp": 1, "start_s": 0.0, "end_s": 1.0}
    slices = [
        Slice(**keys, recompute=True, offload=((0, 1), (2, 3)), micro_batch=number, micro_batches=2)
        for number in (0, 1)
    ]
    assert describe(slices) == (
        "Memory asks for activations of 2 ops in host memory and recomputed activations of 2 ops."
    )
    assert describe([]) is None


def test_passes_of_a_plan_by_hand_wait_for_copies_in_the_simulation() -> None:
    """Three ops of 1 s and 2 s, copies of 3 s: forward 1 + 3 x 3; backward 3 x 3 + 2."""
    profile = profile_of(net("a/m", 3, 3 * GB))
    piece = Slice(metaop="a/m", ops=(0, 3), devices=(0,), dp=1, start_s=0, end_s=9, offload=((0, 3),))
    simulation = simulate(plan_of(profile, cluster(1.0, memory_gib=80), [(piece,)]))
    forward, backward = simulation.spans
    assert (forward.activity, backward.activity) == (Activity.FORWARD, Activity.BACKWARD)
    assert forward.end_s - forward.start_s == pytest.approx(1 + 3 * 3)
    assert backward.end_s - backward.start_s == pytest.approx(3 * 3 + 2)


@pytest.mark.parametrize(("host_memory_gib", "fits"), [(12.5, True), (11.0, False)])
def test_sets_of_tasks_fit_a_node_s_memory_each_by_itself(host_memory_gib: float, *, fits: bool) -> None:
    """a moves 12 GB, which are 11.2 GiB; b, which runs in other steps, none."""
    profile = profile_of(net(), net("b/m", 2, 1))
    on = cluster(10, memory_gib=400, host_memory_gib=host_memory_gib)
    a, b = (make_problem(profile.of_tasks([task]), on) for task in "ab")
    slices = [
        slice_of(metaop, (0, metaop.num_ops), [0], 0.0).model_copy(update={"offload": ranges})
        for metaop, ranges in zip(profile.metaops, [((0, 12),), ()], strict=True)
    ]
    both = as_early_as_possible(slices, profile.by_name)
    found = evaluate_in_turn([make_problem(profile, on), a, b], [both, slices[:1], slices[1:]])
    assert (found is not None) == fits


def test_what_is_shared_out_is_kept_beside_what_is_moved() -> None:
    """Where all devices share out the parameters, of which the search over everything can't say anything."""
    metaop = metaop_of(
        "a/m",
        12,
        {1: 3.0, 2: 1.5},
        activation_bytes_per_op=2 * GB,
        inner_output_bytes=MIB,
        param_bytes_per_op=MIB,
    )
    profile = profile_of(metaop).model_copy(update={"optimizer_state_sharded": True})
    request = {"a/m": Sharding.PARAMETERS}
    without, with_link = (
        make_plan(profile, cluster(speed, num_devices=2), sharding=request) for speed in (None, 1.1)
    )
    assert moved(without)[0] == 0 < moved(without)[1]
    assert with_link.sharding == request and not check_plan(with_link, profile)
    assert moved(with_link)[0] > 0
    assert with_link.predicted.iteration_s < without.predicted.iteration_s
    assert any("in host memory" in note for note in with_link.notes)


def test_sets_of_tasks_move_nothing_where_the_user_says_so() -> None:
    whole = profile_of(net(), net("b/m", 2, 1))
    sets = tuple(TaskShare(tasks=tuple(tasks), share=0.5) for tasks in ("a", "ab"))
    profile = whole.model_copy(update={"task_sets": sets})
    free, left = (make_plan(profile, cluster(1.1), offload=request) for request in (None, False))
    assert all(moved(each)[0] > 0 for each in free.set_plans.values())
    assert all(moved(each)[0] == 0 for each in left.set_plans.values())


def test_what_passes_wait_is_of_ops_without_what_runs_again_in_part() -> None:
    """Ops of 1 and 2 s, a quarter of the former once more; half of them are moved, a copy of 4 s each."""
    memory = SELECTIVE["memory"][0].model_copy(update={"kept_bytes": (0, GB)})
    part = net().model_copy(update={"selective_share": 0.25, "memory": (memory,)})
    on = cluster(0.25)
    problem = make_problem(profile_of(part), on, MemoryFallback(selective={"a/m": 12}))
    keys = {"metaop": "a/m", "ops": (0, 12), "devices": (0,), "dp": 1, "start_s": 0.0, "end_s": 1.0}
    again = {"recompute": True, "selective": True, "offload": ((4, 10),)}
    piece = Slice.model_validate(keys | again)
    found = _stalls(problem, piece)
    assert found == stalls(piece, part, on, OpSeconds(1.0, 2.0))
    assert found.backward_s > 0


def uneven(num_devices: int = 1, **more: Any) -> MetaOpProfile:
    """24 ops, of which the last 12 keep nine times as much as the others, and that take 3 GB forward."""
    few, many = (
        SELECTIVE["memory"][0].model_copy(
            update={"first_op": first, "kept_bytes": (0, kept), "forward_bytes": (0, 3 * GB)}
        )
        for first, kept in ((0, GB // 5), (12, 9 * GB // 5))
    )
    times = {1: 3.0, num_devices: 3.0 / num_devices}
    sizes = {"activation_bytes_per_op": GB, "inner_output_bytes": MIB, "memory": (few, many)}
    return metaop_of("a/m", 24, times, selective_share=0.25, **(sizes | more))


EVEN = net(num_ops=24).model_copy(
    update={
        "selective_share": 0.25,
        "memory": (SELECTIVE["memory"][0].model_copy(update={"kept_bytes": (0, GB)}),),
    }
)
SUMMING = uneven(2, batch_sums=({"kind": "sum", "num_bytes": GB, "forward": 1.0, "backward": 2.0},))


@pytest.mark.parametrize("share", [0.25, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("again", Again)
@pytest.mark.parametrize("metaop", [EVEN, uneven(), SUMMING])
def test_what_is_moved_is_estimated_as_predicted(share: float, again: Again, metaop: MetaOpProfile) -> None:
    """Two pieces of ops of 1 s forward that keep 1 GB on average, of which every fourth is moved, or nearly
    all; their passes wait for copies, and on two devices sum something.
    """
    devices = range(metaop.curve[-1].num_devices)
    on = cluster(1.0001 * share, memory_gib=80, num_devices=len(devices))
    problem = make_problem(profile_of(metaop), on)
    keeps = {"recompute": again is not Again.NOTHING, "selective": again is Again.SELECTIVE}
    slices = [
        slice_of(metaop, ops, devices, 0.0, **keeps).model_copy(update={"offload": spread_over(*ops, share)})
        for ops in ((0, 10), (10, 24))
    ]
    begun = measure_as_they_are(problem, "by hand", timed(problem, slices, mirrored(range(2))))
    assert begun is not None and begun.memory[0].host_bytes > 0
    seconds, filled = estimated(problem, begun)
    assert seconds == pytest.approx(begun.prediction.iteration_s, rel=1e-5)
    assert filled == pytest.approx([1.0] * len(devices), rel=1e-3)
