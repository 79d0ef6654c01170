"""Parameters that several replica groups of devices share out, each for itself: their groups, bytes and
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.device_memory import find_needs
from spindle_cli.account.groups import replica_groups_among
from spindle_cli.account.step_end import between_replica_groups_bytes
from spindle_cli.account.traffic import traffic_of
from spindle_cli.account.types import Collective, ParameterGroup, Purpose
from spindle_cli.costs.parameters import moved_in_passes
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import MetaOpProfile, OpMemory, Profile
from spindle_cli.units import MIB

PARAMETERS, GRADIENTS = Sharding.PARAMETERS, Sharding.GRADIENTS
SIZES = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}
NOTHING = OpMemory.model_validate(
    {f"{name}_bytes": (0, 0) for name in ("kept", "forward", "backward", "first_backward")}
)


def net(task: str, **more: Any) -> MetaOpProfile:
    """One op of 12 MiB of parameters that all tasks use, and of nothing else."""
    keys: dict[str, Any] = {"parameters": "net", "param_bytes_per_op": 12 * MIB, "batch_size": 12}
    keys |= {"memory": (NOTHING,), "activation_bytes_per_op": 0, **more}
    return metaop_of(f"{task}/net", 1, SIZES, **keys).model_copy(update={"output_bytes": 0})


def profile_on(*metaops: MetaOpProfile, level: Sharding = PARAMETERS, **more: Any) -> Profile:
    update = {"optimizer_state_sharded": True, "optimizer_state_per_param": 2.0, **more}
    return profile_of(*metaops).model_copy(update=update).sharded({"net": level})


def planned(
    *replica_groups: Sequence[int], level: Sharding = PARAMETERS, per_node: int | None = None, **more: Any
) -> Plan:
    """A task for each of these sets of devices."""
    nets = [net(chr(ord("a") + number), **more) for number in range(len(replica_groups))]
    pieces = [
        slice_of(each, (0, 1), tuple(replica_group), 0.0)
        for each, replica_group in zip(nets, replica_groups, strict=True)
    ]
    num_devices = max(device for replica_group in replica_groups for device in replica_group) + 1
    cluster = cluster_of(num_devices, devices_per_node=per_node)
    plan = plan_of(profile_on(*nets, level=level), cluster, [[piece] for piece in pieces])
    return plan.model_copy(update={"optimizer_state_sharded": True, "sharding": {"net": level}})


@pytest.mark.parametrize(
    ("run_on", "replica_groups"),
    [
        ([{2, 3}, {1, 0}, {3, 2}], ((0, 1), (2, 3))),
        ([{0, 1, 4}, {2, 3}], ((0, 1, 4), (2, 3))),
        ([{0, 1}, {0, 1}], ((0, 1),)),
        ([{0, 1}, {1, 2}], ()),
        ([{0, 1}, {0, 1, 2}], ()),
        ([{0, 1}, {2}], ()),
        ([{0}], ()),
    ],
)
def test_replica_groups_have_no_device_in_common_and_two_at_least(
    run_on: list[set[int]], replica_groups: tuple[tuple[int, ...], ...]
) -> None:
    assert replica_groups_among(run_on) == replica_groups


def the_group(plan: Plan) -> ParameterGroup:
    (group,) = traffic_of(plan).groups
    return group


def test_what_replica_groups_share_out_is_one_group_of_all_of_them() -> None:
    group = the_group(planned((2, 3), (0, 1, 4)))
    assert (group.devices, group.replica_groups) == ((0, 1, 2, 3, 4), ((0, 1, 4), (2, 3)))
    assert (group.slices, group.sharding) == ((0, 1), PARAMETERS)
    assert group.is_summed_at_once and group.is_handed_on
    assert group.in_replica_group(4).devices == group.in_replica_group(0).devices == (0, 1, 4)
    assert group.in_replica_group(3).replica_groups == ()


def test_one_replica_group_sums_in_its_passes_alone() -> None:
    group = the_group(planned((0, 1), (0, 1)))
    assert group.replica_groups == () and group.sharding is PARAMETERS
    assert not group.is_summed_at_once and not group.is_handed_on
    assert group.in_replica_group(1) is group


def test_gradients_alone_are_not_shared_out_by_replica_groups() -> None:
    group = the_group(planned((0, 1), (2, 3), level=GRADIENTS))
    assert (group.replica_groups, group.sharding) == ((), Sharding.OPTIMIZER)


def test_what_is_not_trained_is_gathered_in_each_replica_group_and_summed_by_none() -> None:
    plan = planned((0, 1), (2, 3), trainable_fraction=0.0)
    group = the_group(plan)
    assert group.replica_groups == ((0, 1), (2, 3))
    assert not group.is_summed_at_once and not group.is_handed_on
    kinds = {each.kind for each in traffic_of(plan).collectives}
    assert kinds.isdisjoint({Collective.SUM, Collective.GATHER})


def test_each_replica_group_has_a_communicator_for_its_passes_and_all_have_one_for_their_sums() -> None:
    found = traffic_of(planned((0, 1), (2, 3, 4))).communicators
    assert [each.ranks for each in found if each.purpose is Purpose.SHARDS] == [(0, 1), (2, 3, 4)]
    spare = planned((0, 1), (2, 3)).model_copy(update={"cluster": cluster_of(5)})
    sums = [each.ranks for each in traffic_of(spare).communicators if each.purpose is Purpose.SUMS]
    assert sums == [(0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("replica_groups", "per_node", "num_bytes"),
    [
        # Of 12 MiB each device has 6, and hands on half of that: 3 MiB.
        (((0, 1), (2, 3)), 4, 3 * 4 / 3),
        # From each node two devices do.
        (((0, 1), (2, 3)), 2, 2 * 3 * 4 / 3),
        # Where the node is not the replica group's, too.
        (((0, 2), (1, 3)), 2, 2 * 3 * 4 / 3),
        # Of two and three devices those of the smaller replica group have most.
        (((0, 1), (2, 3, 4)), None, 3 * 5 / 4),
        # Each hands on two thirds of its 6 MiB to two others.
        (((0, 1), (2, 3), (4, 5)), None, 4 * 6 / 5),
    ],
)
def test_replica_groups_exchange_as_much_as_a_gather_of_these_bytes_would(
    replica_groups: tuple[tuple[int, ...], ...], per_node: int | None, num_bytes: float
) -> None:
    plan = planned(*replica_groups, per_node=per_node)
    group = the_group(plan)
    assert between_replica_groups_bytes(group, 12 * MIB, plan.cluster) == pytest.approx(
        num_bytes * MIB, abs=1
    )
    moved = {each.kind: each for each in traffic_of(plan).collectives if each.group is not None}
    for kind in (Collective.SUM, Collective.GATHER):
        assert (moved[kind].num_bytes, moved[kind].rounds) == (
            pytest.approx(num_bytes * MIB, abs=1),
            1,
        )
        assert moved[kind].devices == group.devices and moved[kind].weights == ()


def test_weights_are_those_of_each_replica_group() -> None:
    plan = planned((0, 3), (1, 2)).model_copy(update={"shard_weights": (1, 3, 2, 5)})
    group = the_group(plan)
    assert (group.weights, group.in_replica_group(0).weights, group.in_replica_group(1).weights) == (
        (1, 3, 2, 5),
        (1, 5),
        (3, 2),
    )
    assert all(each.weights == () for each in traffic_of(plan).collectives)


def held(plan: Plan, **more: Any) -> list[tuple[float, float, float]]:
    """MiB of parameters, gradients and state that each device keeps all the time."""
    update = {"optimizer_state_per_param": 2.0, **more}
    needs = find_needs(plan.metaops, plan.slices, plan.cluster, plan.model_copy(update=update), None)
    return [(need.parameters / MIB, need.summed_gradients / MIB, need.state / MIB) for need in needs]


def test_each_device_keeps_a_part_of_its_replica_group_s_and_steps_a_part_of_all() -> None:
    """12 MiB, twice as much of state: of two replica groups of two each device has a half, and a fourth of
    the state.
    """
    assert held(planned((0, 1), (2, 3))) == [pytest.approx((6, 6, 6))] * 4
    assert held(planned((0, 1), (0, 1))) == [pytest.approx((6, 6, 12))] * 2


def test_replica_groups_of_other_sizes_keep_other_parts() -> None:
    three, two = pytest.approx((4, 4, 4)), pytest.approx((6, 6, 6))
    assert held(planned((2, 3), (0, 1, 4))) == [three, three, two, two, three]


def test_three_replica_groups_step_a_third_of_a_range_each() -> None:
    assert held(planned((0, 1), (2, 3), (4, 5))) == [pytest.approx((6, 6, 4))] * 6


def test_weights_count_within_a_replica_group() -> None:
    plan = planned((0, 1), (2, 3)).model_copy(update={"shard_weights": (1, 2, 3, 1)})
    parts = [4, 8, 9, 3]
    assert held(plan) == [pytest.approx((part, part, part)) for part in parts]


def test_tensor_parallelism_that_leaves_each_part_on_one_device_of_a_group_shards_state_alone() -> None:
    """Each device has a half of 12 MiB, with all gradients of it, and half of its state."""
    plan = planned((0, 1), (2, 3))
    both = NOTHING, NOTHING.model_copy(update={"tp": 2})
    metaops = tuple(each.model_copy(update={"memory": both}) for each in plan.metaops)
    waves = tuple(
        wave.model_copy(
            update={"slices": tuple(each.model_copy(update={"dp": 1, "tp": 2}) for each in wave.slices)}
        )
        for wave in plan.waves
    )
    split = Plan.model_construct(**{**dict(plan), "metaops": metaops, "waves": waves})
    assert {(group.replica_groups, group.sharding) for group in traffic_of(split).groups} == {
        ((), Sharding.OPTIMIZER)
    }
    assert held(split) == [pytest.approx((6, 6, 6))] * 4


def test_a_sum_over_replica_groups_takes_what_a_device_sends_and_what_it_gets_for_it() -> None:
    """Of 6 MiB each sends half, and gets half of the other replica group's, over NCCL, too: between two
    replica groups with the same ranges what it sends goes from where it is. A replica group of three has 4
    MiB each, and in three replica groups each sends two thirds, and gets as much. Sums in passes take nothing
    there.
    """

    def taken(plan: Plan, device: int = 0) -> float:
        cluster = plan.cluster.model_copy(update={"backend": "nccl"})
        need = find_needs(plan.metaops, plan.slices, cluster, plan, None)[device]
        (backward,) = [each for each in need.passes if each.is_backward]
        return backward.fullest.buffers / MIB

    assert taken(planned((0, 1), (0, 1)).model_copy(update={"waves": planned((0, 1)).waves})) == 0
    assert taken(planned((0, 1), (2, 3))) == pytest.approx(3)
    uneven = planned((0, 1), (2, 3, 4))
    assert (taken(uneven), taken(uneven, 4)) == (pytest.approx(6), pytest.approx(4))
    assert taken(planned((0, 1), (2, 3), (4, 5))) == pytest.approx(8)


def test_passes_gather_among_their_replica_group() -> None:
    """The same on four devices in two replica groups as on two devices alone."""
    plan, alone = planned((0, 1), (2, 3)), planned((0, 1))
    found = [
        moved_in_passes(each.slices[0], each.metaops[0], cluster_of(4), profile_on(net("a")))
        for each in (plan, alone)
    ]
    assert found[0] == found[1] and found[0] is not None
