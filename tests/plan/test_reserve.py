"""Memory that no tensor gets, in the planner and in the checker."""

from __future__ import annotations

import pytest
from random_profiles import random_profile

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.check.run import check_plan
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster, NodeGroup
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan, Predicted

MIB, GIB = 2**20, 2**30


def one_gpu(group: NodeGroup) -> Cluster:
    return cluster_of(1).model_copy(update={"nodes": (group,)})


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
