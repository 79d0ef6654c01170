"""Plans in which several replica groups of devices share out the same parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from helpers.cut import cuttable
from helpers.made import made_plan
from helpers.plans import cluster_of, profile_of
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.check.run import check_plan
from spindle_cli.files.cluster import MOST_GB_PER_S, Cluster, Link, Links, NodeGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.find_as_requested import find_as_requested
from spindle_cli.plan.best.request import PlanRequest
from spindle_cli.plan.file import plan_text
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.replica_groups.cluster import cluster_of as cluster_of_replica_groups
from spindle_cli.plan.replica_groups.cluster import replica_groups_of
from spindle_cli.plan.replica_groups.find import InReplicaGroups, sizes_of
from spindle_cli.plan.replica_groups.planner import ReplicaGroupsPlanner, on_devices, planner_of
from spindle_cli.plan.replica_groups.profile import beside_bytes, on_replica_groups, shared_out, way_on
from spindle_cli.plan.slices import Slice
from spindle_cli.profile.types import MetaOpProfile, OpMemory, Profile
from spindle_cli.simulate.run import simulate
from spindle_cli.units import GIB, MIB

PARAMETERS = Sharding.PARAMETERS
# Of an op on a share of so many samples: what does not shrink with the share makes small ones slow.
SHARE_S = {n: 1.0 + 0.1 * n for n in (1, 2, 4, 8)}
UNEVEN_S = {n: 1.0 + 0.1 * n for n in (1, 2, 3, 4, 5, 10)}
NOTHING = OpMemory(
    kept_bytes=(0, 0), forward_bytes=(0, 0), backward_bytes=(0, 0), first_backward_bytes=(0, 0)
)


def net(name: str, share_s: dict[int, float] = SHARE_S, **more: object) -> MetaOpProfile:
    """10 ops with 100 MiB each of the same parameters, that keep nothing."""
    settings = {"parameters": "net", "param_bytes_per_op": 100 * MIB, "memory": (NOTHING,)}
    metaop = cuttable(name, 10, share_s, **{"activation_bytes_per_op": 0, **settings, **more})
    return metaop.model_copy(update={"output_bytes": 0})


def sharing(*metaops: MetaOpProfile) -> Profile:
    return profile_of(*metaops).model_copy(update={"optimizer_state_sharded": True})


def by_replica_groups(profile: Profile) -> Profile:
    return profile.sharded(shared_out(profile))


def gpus(count: int = 2, nics: int | None = None) -> Cluster:
    """Nodes of eight devices."""
    group = NodeGroup(count=count, devices=8, device="a800-80gb", memory_gib=80, nics=nics)
    curve = ((1e6, 10.0), (1e7, 20.0))
    links = Links(
        intra_node=Link(latency_us=3, bandwidth_gb_per_s=100),
        inter_node=Link(latency_us=14, bandwidth_gb_per_s=20, curve=curve),
    )
    return Cluster(name="gpus", nodes=(group,), links=links)


def test_a_replica_group_is_a_device_with_the_memory_and_the_links_of_all() -> None:
    """12 and 4 devices: each pair of replica groups is linked by as many cards as the smaller has."""
    cluster = gpus()
    replica_groups = replica_groups_of(cluster, (12, 4))
    assert [replica_group.devices for replica_group in replica_groups] == [tuple(range(12)), (12, 13, 14, 15)]
    assert [replica_group.cluster.node_sizes for replica_group in replica_groups] == [(8, 4), (4,)]
    small = cluster_of_replica_groups(replica_groups, cluster)
    assert small.types == ("a800-80gb-x12", "a800-80gb-x4")
    assert small.memory_bytes == (12 * 76 * GIB, 4 * 76 * GIB)  # of each, 4 are left free
    assert small.reserve_bytes == (12 * int(3.35 * GIB), 4 * int(3.35 * GIB))
    link = small.link(0, 1)
    assert (link.latency_us, link.bandwidth_gb_per_s) == (14, 4 * 20)
    assert link.curve == ((4e6, 40.0), (4e7, 80.0))
    less = cluster_of_replica_groups(replica_groups, cluster, 10 * GIB)
    assert less.memory_bytes == (12 * 66 * GIB, 4 * 66 * GIB)


def test_equal_replica_groups_are_devices_of_one_type() -> None:
    """With two cards a node a replica group of eight has two; inside of a node replica groups have the links
    of all devices.
    """
    cluster = gpus(nics=2)
    small = cluster_of_replica_groups(replica_groups_of(cluster, (8, 8)), cluster)
    assert small.types == ("a800-80gb",)
    assert small.link(0, 1).bandwidth_gb_per_s == 2 * 20
    half = cluster_of_replica_groups(
        replica_groups_of(cluster, (12, 4)), cluster
    )  # with one of its node's two cards
    assert half.link(0, 1).bandwidth_gb_per_s == 20
    node = gpus(1)
    inside = cluster_of_replica_groups(replica_groups_of(node, (4, 4)), node)
    assert inside.link(0, 1).bandwidth_gb_per_s == 4 * 100
    assert inside.link(0, 1).latency_us == 3


def test_links_of_a_replica_group_are_no_faster_than_a_link_can_be() -> None:
    """Where a cluster file says links that take no time, side by side they would be more than the file can
    say: that was an error in the middle of planning.
    """
    most = Link(latency_us=0, bandwidth_gb_per_s=MOST_GB_PER_S, curve=((1e6, MOST_GB_PER_S / 2),))
    cluster = gpus().changed(links=Links(intra_node=most, inter_node=most))
    link = cluster_of_replica_groups(replica_groups_of(cluster, (8, 8)), cluster).link(0, 1)
    assert link.bandwidth_gb_per_s == MOST_GB_PER_S
    assert link.curve == ((8e6, MOST_GB_PER_S),)


def test_devices_are_cut_in_eighths_type_after_type() -> None:
    assert list(sizes_of(2, cluster_of(4))) == [(2, 2)]
    assert list(sizes_of(2, cluster_of(8))) == [(6, 2), (5, 3), (4, 4)]
    assert list(sizes_of(2, gpus())) == [(14, 2), (12, 4), (10, 6), (8, 8)]
    assert list(sizes_of(3, cluster_of(6))) == [(2, 2, 2)]
    types = cluster_of_types({"fast": 4, "slow": 2})
    assert list(sizes_of(2, types)) == [(4, 2)]
    assert list(sizes_of(3, types)) == [(2, 2, 2)]
    assert list(sizes_of(1, types)) == []


@pytest.mark.parametrize(("share_s", "op_s"), [(SHARE_S, 1.2), (UNEVEN_S, 1.3)])
def test_a_replica_group_takes_its_largest_share_and_what_it_gathers_and_scatters(
    share_s: dict[int, float], op_s: float
) -> None:
    """Of 8 samples four devices have 2 each, of 10 one has 3. All hides but the first gather of each pass,
    and the last scatter: 3 parts of 25 MiB go around.
    """
    cluster = cluster_of(4)
    profile = by_replica_groups(sharing(net("a/net", share_s)))
    seen = on_replica_groups(profile, replica_groups_of(cluster, (4,)))
    assert seen is not None
    (metaop,) = seen.metaops
    (point,) = metaop.curve
    once_s = 3 * (10e-6 + 25 * MIB / 5e9)
    assert (point.num_devices, point.dp, point.tp) == (1, 1, 1)
    assert point.forward_s == pytest.approx(op_s / 3 + once_s / 10)
    assert point.backward_s == pytest.approx(op_s * 2 / 3 + 2 * once_s / 10)


def test_what_shares_take_of_memory_is_counted_for_all_devices() -> None:
    """Of 10 samples four devices are taken to have 3 each; what is fixed each has."""
    memory = NOTHING.model_copy(update={"kept_bytes": (7, 1000), "forward_bytes": (5, 2000)})
    profile = by_replica_groups(
        sharing(net("a/net", UNEVEN_S, memory=(memory,), activation_bytes_per_op=1000))
    )
    seen = on_replica_groups(profile, replica_groups_of(cluster_of(4), (4,)))
    assert seen is not None
    (metaop,) = seen.metaops
    assert metaop.activation_bytes_per_op == 1200
    (entry,) = metaop.memory
    assert (entry.kept_bytes, entry.forward_bytes) == ((28, 1200), (20, 2400))
    assert seen.sharding == {}


def test_an_update_takes_as_long_as_that_of_a_replica_group_s_part() -> None:
    profile = by_replica_groups(sharing(net("a/net"))).model_copy(update={"optimizer_s_per_byte": 12e-9})
    seen = on_replica_groups(profile, replica_groups_of(cluster_of(6), (4, 2)))
    assert seen is not None and seen.optimizer_s_per_byte == 6e-9


def test_what_has_no_parameters_runs_on_as_few_devices_as_are_fastest() -> None:
    loss = cuttable("a/loss", 1, {1: 0.5, 2: 0.2, 4: 0.3, 8: 0.9}, parameters=None, param_bytes_per_op=0)
    way = way_on(loss, 8, {})
    assert way is not None and way.dp == 4
    assert way.op.forward_s == pytest.approx(0.2 / 3)
    assert way_on(net("a/net"), 8, {"net": PARAMETERS}) is not None
    assert way_on(net("a/net"), 9, {"net": PARAMETERS}) is None


def test_what_devices_take_beside_a_replica_group_s_plan() -> None:
    """Twice the parameters and gradients of the largest op, and on GPUs four communicators: each of a node's
    eight devices takes 24 x 12 x 22 / 8 MiB, of all 16 less.
    """
    profile = sharing(net("a/net", extra_param_bytes={3: 20 * MIB}))
    wide = profile.model_copy(update={"gradient_bytes_per_param": 2.0})
    assert beside_bytes(profile, cluster_of(4)) == 2 * 120 * MIB * 2
    assert beside_bytes(wide, cluster_of(4)) == 2 * 120 * MIB * 3
    assert beside_bytes(wide, gpus()) == 2 * 120 * MIB * 3 + 4 * 792 * MIB


def devices_of(plan_slices: tuple[Slice, ...]) -> dict[str, tuple[int, ...]]:
    return {piece.metaop: piece.devices for piece in plan_slices}


def test_replica_groups_win_where_small_shares_are_slow_and_memory_is_short() -> None:
    """On four devices each task would take 10 ops of 1.2 s, one behind the other: 24 s. On two they take 1.4
    s, side by side: 14 s. Whole, parameters, gradients and state take 2,600 MiB.
    """
    profile = sharing(net("a/net"), net("b/net"))
    cluster = cluster_of(4, memory_gib=2300 / 1024)
    plan = made_plan(profile, cluster)
    assert check_plan(plan, profile) == ()
    assert plan.sharding == {"net": PARAMETERS}
    assert sorted(devices_of(plan.slices).values()) == [(0, 1), (2, 3)]
    assert plan.predicted.compute_s == pytest.approx(14.0, abs=1e-6)
    assert plan.notes == (
        "Memory asks for sharing out the parameters of net by 2 replica groups of 2 devices.",
    )
    # one gather forward, one backward and the last scatter do not hide
    assert plan.predicted.transfer_s == pytest.approx(3 * (10e-6 + 50 * MIB / 5e9), abs=1e-6)
    # behind the last pass each device takes half of its 500 MiB from the other replica group, and before the
    # next step the halves of 50 MiB of the first op and of the second, which is gathered with it
    assert plan.predicted.gradient_sum_s == pytest.approx(300 * MIB / 5e9, rel=0.01)
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=1e-5)


def test_shares_are_unequal_where_a_replica_group_does_not_divide_a_batch() -> None:
    """Of 10 samples each of four devices has two or three: 10 ops of 1.3 s."""
    profile = sharing(net("a/net", UNEVEN_S), net("b/net", UNEVEN_S))
    cluster = cluster_of(8, memory_gib=1500 / 1024)
    plan = make_plan(profile, cluster)
    assert check_plan(plan, profile) == ()
    assert sorted(devices_of(plan.slices).values()) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {piece.rows for piece in plan.slices} == {(0, 2, 5, 7, 10)}
    assert plan.predicted.compute_s == pytest.approx(13.0, abs=1e-6)


def test_replica_groups_have_as_much_of_the_devices_as_their_tasks_have_work() -> None:
    """One task has three times as much to do: 6 of 8 devices, as near as eighths and its batch allow."""
    profile = sharing(
        cuttable("a/net", 30, {n: 0.1 + 1.0 * n for n in (1, 2, 3, 4, 6, 12)}, parameters="net"),
        cuttable("b/net", 10, {n: 0.1 + 1.0 * n for n in (1, 2, 3, 4, 6, 12)}, parameters="net"),
    )
    cluster = cluster_of(8)
    planner = planner_of(by_replica_groups(profile), cluster, replica_groups_of(cluster, (6, 2)), 1)
    assert planner is not None
    found = planner.planned(than_s=float("inf"))
    assert found is not None
    assert devices_of(found.best.slices)["a/net"] == (0, 1, 2, 3, 4, 5)
    assert found.best.prediction.compute_s == pytest.approx(63.0, abs=1e-3)
    assert found.note is not None and "by replica groups: 1 of 6, 1 of 2 devices." in found.note


def test_micro_batches_of_replica_groups_are_those_of_their_devices() -> None:
    """Activations of a batch of 8 do not fit, of a micro-batch of 4 they do: two devices have two samples."""
    memory = NOTHING.model_copy(update={"kept_bytes": (0, 200 * MIB), "forward_bytes": (0, 200 * MIB)})
    nets = [net(f"{task}/net", memory=(memory,)) for task in "ab"]
    each = [one.model_copy(update={"inner_output_bytes": 200 * MIB}) for one in nets]  # nothing to recompute
    profile = sharing(*each)
    cluster = cluster_of(4, memory_gib=2900 / 1024)
    planner = planner_of(by_replica_groups(profile), cluster, replica_groups_of(cluster, (2, 2)), 1)
    assert planner is not None
    found = planner.planned(than_s=float("inf"))
    assert found is not None and found.cut is not None
    assert dict(found.cut.counts) == {"a": 2, "b": 2}
    folded = found.cut.folded(found.best.slices)
    assert {(piece.dp, piece.micro_batches, piece.rows) for piece in folded} == {(2, 2, None)}
    assert found.best.prediction.compute_s == pytest.approx(2 * 10 * 1.2, abs=1e-3)


def test_passes_keep_the_order_that_replica_groups_have() -> None:
    profile = by_replica_groups(sharing(net("a/net"), net("b/net")))
    cluster = cluster_of(2, memory_gib=64)
    replica_groups = replica_groups_of(cluster, (2,))
    seen = on_replica_groups(profile, replica_groups)
    assert seen is not None
    of_replica_groups = find_as_requested(
        seen, cluster_of_replica_groups(replica_groups, cluster), PlanRequest(effort=0)
    )
    assert of_replica_groups is not None
    first, second = of_replica_groups.best.slices
    # a forward, b forward, a backward, b backward
    order = (
        first.model_copy(
            update={"start_s": 0.0, "end_s": 1.0, "backward_start_s": 2.0, "backward_end_s": 3.0}
        ),
        second.model_copy(
            update={"start_s": 1.0, "end_s": 2.0, "backward_start_s": 3.0, "backward_end_s": 4.0}
        ),
    )
    evaluated = on_devices(
        make_problem(profile, cluster), replace(of_replica_groups.best, slices=order), replica_groups
    )
    assert evaluated is not None
    one, other = evaluated.slices
    assert one.end_s == pytest.approx(14 / 3, abs=1e-6)
    assert other.start_s == one.end_s
    assert one.backward_start_s == other.end_s
    assert other.backward_end_s == pytest.approx(28.0, abs=1e-6)


def test_replica_groups_of_several_types_are_of_one_each() -> None:
    """Two types, the task with twice the work on the one that is twice as fast."""
    sizes = {"fast": 2, "slow": 2}
    seconds = {"fast": 0.5, "slow": 1.0}
    more = {"parameters": "net", "param_bytes_per_op": 100 * MIB, "memory": (NOTHING,)}
    profile = profile_on_types(
        metaop_on_types("a/net", 20, seconds, **more), metaop_on_types("b/net", 10, seconds, **more)
    ).model_copy(update={"optimizer_state_sharded": True})
    cluster = cluster_of_types(sizes, devices_per_node=2)
    planner = planner_of(by_replica_groups(profile), cluster, replica_groups_of(cluster, (2, 2)), 1)
    assert planner is not None
    found = planner.planned(than_s=float("inf"))
    assert found is not None
    assert devices_of(found.best.slices) == {"a/net": (0, 1), "b/net": (2, 3)}
    assert found.best.prediction.compute_s == pytest.approx(40.0, abs=1e-3)


def predicted_s(found: PlanResult) -> float:
    return found.best.prediction.iteration_s


@cache
def short_of_memory() -> tuple[Profile, Cluster, PlanResult]:
    """Where replica groups win, with the best plan without them."""
    profile, cluster = sharing(net("a/net"), net("b/net")), cluster_of(4, memory_gib=2300 / 1024)
    return profile, cluster, found_otherwise(profile, cluster)


def found_otherwise(profile: Profile, cluster: Cluster) -> PlanResult:
    found = find_as_requested(profile, cluster, PlanRequest())
    assert found is not None
    return found


def test_replica_groups_are_left_out_where_something_else_is_asked_for() -> None:
    profile, short, found = short_of_memory()
    assert InReplicaGroups(profile, short, PlanRequest(), 1.0, predicted_s).or_better(found) is not found
    assert (
        InReplicaGroups(profile, short, PlanRequest(), 1.0, lambda each: -predicted_s(each)).or_better(found)
        is found
    )
    for request in (
        PlanRequest(effort=0),
        PlanRequest(strategy="sequential"),
        PlanRequest(micro_batches={"a": 2}),
        PlanRequest(sharding={"net": PARAMETERS}),
        PlanRequest(equal_shares=True),
    ):
        assert InReplicaGroups(profile, short, request, 1.0, predicted_s).or_better(found) is found
    whole = profile.model_copy(update={"optimizer_state_sharded": False})
    assert InReplicaGroups(whole, short, PlanRequest(), 1.0, predicted_s).or_better(found) is found


def test_nothing_is_searched_where_nothing_can_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is ample; or ops that take half the time on half the samples gain nothing from larger
    shares, by the bound.
    """

    def refuse(*_: object) -> None:
        raise AssertionError("no search is worth its time")

    monkeypatch.setattr(ReplicaGroupsPlanner, "planned", refuse)
    profile, ample = sharing(net("a/net"), net("b/net")), cluster_of(4, memory_gib=64)
    plain = found_otherwise(profile, ample)
    assert InReplicaGroups(profile, ample, PlanRequest(), 1.0, predicted_s).or_better(plain) is plain
    profile = sharing(net("a/net", {n: 0.1 * n for n in (1, 2, 4, 8)}))
    short = cluster_of(4, memory_gib=2300 / 1024)
    found = found_otherwise(profile, short)
    assert found.is_short
    assert InReplicaGroups(profile, short, PlanRequest(), 1.0, predicted_s).or_better(found) is found
    with pytest.raises(AssertionError, match="no search"):
        InReplicaGroups(profile, short, PlanRequest(), 1.0, predicted_s).or_better(None)


def test_slower_plans_of_replica_groups_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, cluster, found = short_of_memory()
    longer = replace(found.best.prediction, iteration_s=1.01 * predicted_s(found))
    slower = replace(found, best=replace(found.best, prediction=longer))
    monkeypatch.setattr(ReplicaGroupsPlanner, "planned", lambda *_: slower)
    assert (
        InReplicaGroups(profile, cluster, PlanRequest(), 1.0, lambda each: -predicted_s(each)).or_better(
            found
        )
        is found
    )
    assert InReplicaGroups(profile, cluster, PlanRequest(), 1.0, predicted_s).or_better(None) is slower


def test_a_planner_gives_up_what_is_no_faster() -> None:
    profile, cluster = sharing(net("a/net"), net("b/net")), cluster_of(4, memory_gib=2300 / 1024)
    planner = planner_of(by_replica_groups(profile), cluster, replica_groups_of(cluster, (2, 2)), 1)
    assert planner is not None
    assert planner.lower_bound_s == pytest.approx(14.0, abs=0.1)
    assert planner.planned(than_s=14.5) is not None
    assert planner.planned(than_s=14.0) is None


def test_same_inputs_same_plan() -> None:
    profile, cluster = sharing(net("a/net"), net("b/net")), cluster_of(4, memory_gib=2300 / 1024)
    assert plan_text(made_plan(profile, cluster)) == plan_text(make_plan(profile, cluster))
