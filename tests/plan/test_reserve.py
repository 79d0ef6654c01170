"""Memory that no tensor gets, in the planner and in the checker."""

from __future__ import annotations

import pytest
from random_profiles import random_profile

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.account.device_memory import DeviceMemory
from spindle_cli.check.run import check_plan
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster, NodeGroup
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.search.evaluate import has_room
from spindle_cli.plan.types import Plan, Predicted

MIB, GIB = 2**20, 2**30


def one_gpu(group: NodeGroup) -> Cluster:
    return cluster_of(1).changed(nodes=(group,))


def test_a_plan_that_fills_the_device_to_its_reserve_is_refused_by_planner_and_checker() -> None:
    """Parameters, gradients and optimizer state take 4 x 2 GiB, which 9 GiB hold without a reserve alone."""
    big = metaop_of("a/m", 1, {1: 1.0}, param_bytes_per_op=2 * GIB, activation_bytes_per_op=MIB)
    profile = profile_of(big)
    roomy = one_gpu(NodeGroup(devices=1, device="h100", memory_gib=9, reserve_gib=0))
    tight = one_gpu(NodeGroup(devices=1, device="h100", memory_gib=9, reserve_gib=2))
    plan = make_plan(profile, roomy)
    assert not check_plan(plan, profile)
    (violation,) = check_plan(plan.model_copy(update={"cluster": tight, "predicted": _older(plan)}))
    assert violation.rule == "memory" and "reserve and communicators 2 GiB" in violation.value
    with pytest.raises(NoPlanError, match="reserve and communicators 2 GiB"):
        make_plan(profile, tight)


def test_plans_leave_a_twentieth_of_a_gpu_free_unless_its_reserve_is_given() -> None:
    """8 GiB of parameters, gradients and optimizer state, 1 % of that and 7 % of both are 8.65 GiB, which are
    between 85 and 90 % of 9.8; a tenth of them is reserved.
    """
    big = metaop_of("a/m", 1, {1: 1.0}, param_bytes_per_op=2 * GIB, activation_bytes_per_op=MIB)
    profile = profile_of(big)
    by_default = one_gpu(NodeGroup(devices=1, device="h100", memory_gib=9.8))
    given = one_gpu(NodeGroup(devices=1, device="h100", memory_gib=9.8, reserve_gib=0.98))
    plan = make_plan(profile, given)
    assert max(plan.predicted.peak_memory_bytes) > by_default.fill_bytes[0]
    assert not check_plan(plan.model_copy(update={"cluster": by_default}))  # it is no more than there is
    with pytest.raises(NoPlanError, match=r"and has 9\.31 GiB \(of 9\.8 GiB, some are left free\)"):
        make_plan(profile, by_default)
    larger = one_gpu(NodeGroup(devices=1, device="h100", memory_gib=10.5))
    assert max(make_plan(profile, larger).predicted.peak_memory_bytes) <= larger.fill_bytes[0]


def test_a_plan_has_room_up_to_what_is_left_free() -> None:
    """With communicators, of which the account of slices alone knows nothing."""
    cluster = one_gpu(NodeGroup(devices=1, device="h100", memory_gib=80))
    problem = make_problem(profile_of(metaop_of("a/m", 1, {1: 1.0})), cluster)
    need = DeviceMemory(75 * GIB, 0, 0, 0, 0, 0, 75 * GIB, outside_bytes=GIB)
    assert has_room(problem, (need,))
    assert not has_room(problem, (need.with_communicators(1),))


def test_what_plans_leave_free_is_of_gpus_alone() -> None:
    nodes = (
        NodeGroup(devices=1, device="h100", memory_gib=80),
        NodeGroup(devices=1, device="h100", memory_gib=8),
        NodeGroup(devices=1, device="h100", memory_gib=80, reserve_gib=0),
        NodeGroup(devices=1, device="cpu-slow", memory_gib=80),
    )
    cluster = cluster_of(1).model_copy(update={"nodes": nodes})
    assert cluster.fill_bytes == (76 * GIB, int(8 * GIB) - int(0.4 * GIB), 80 * GIB, 80 * GIB)
    assert cluster.usable_bytes[0] == 76 * GIB - int(3.35 * GIB) and cluster.memory_bytes[0] == 80 * GIB


def test_a_device_has_the_reserve_of_its_own_node_wherever_its_work_was_placed_first() -> None:
    """Devices are exchanged between nodes that reserve nothing and one that reserves 2 GiB."""
    profile = random_profile(2, "wide")
    free = NodeGroup(count=2, devices=2, device="a800-80gb", memory_gib=8000, reserve_gib=0)
    taken = free.model_copy(update={"count": 1, "reserve_gib": 2})
    cluster = cluster_of(6, devices_per_node=2).changed(nodes=(free, taken))
    plan = make_plan(profile, cluster, effort=0)
    assert check_plan(plan, profile) == ()


def _older(plan: Plan) -> Predicted:
    return plan.predicted.model_copy(update={"memory_formula": 2})
