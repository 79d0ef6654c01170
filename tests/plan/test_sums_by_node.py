"""Sums by nodes take communicators: a plan without room for these has all go over all devices at once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from helpers.plans import metaop_of, profile_of
from spindle_cli.account.traffic import communicator_bytes, traffic_of
from spindle_cli.check.run import check_plan
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.plan.best.again import predicted_by
from spindle_cli.plan.best.written import AT_ONCE
from spindle_cli.plan.file import plan_text, read_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile, TaskShare
from spindle_cli.program.link import link_sets
from spindle_cli.program.proof.proof import prove
from spindle_cli.simulate.run import simulate
from spindle_cli.units import GIB


def cluster(memory_gib: float) -> Cluster:
    """2 nodes of 4, with a slow link between them."""
    return Cluster(
        name="gpus",
        nodes=(
            NodeGroup(count=2, devices=4, device="a800-80gb", memory_gib=memory_gib, reserve_gib=1, nics=1),
        ),
        links=Links(
            intra_node=Link(latency_us=8, bandwidth_gb_per_s=100),
            inter_node=Link(latency_us=14, bandwidth_gb_per_s=5),
        ),
    )


def profile(*names: str) -> Profile:
    """Of MetaOps of a GiB of parameters, which are fastest on all devices."""
    speeds = {devices: 8.0 / devices for devices in (1, 2, 4, 8)}
    metaops = (metaop_of(f"{name}/net", 1, speeds, param_bytes_per_op=GIB) for name in names)
    return profile_of(*metaops).model_copy(
        update={"optimizer_state_sharded": True, "optimizer_state_per_param": 2.0}
    )


def goes_by_node(plan: Plan) -> bool:
    by_node = any(group.nodes for group in traffic_of(plan).groups)
    assert by_node == any(group.nodes for group in link_sets(plan).groups)
    return by_node


def gib_of(plan: Plan) -> float:
    return max(plan.predicted.peak_memory_bytes) / GIB


@cache
def roomy() -> Plan:
    return make_plan(profile("a"), cluster(40))


def test_with_room_for_their_communicators_sums_go_by_nodes() -> None:
    assert goes_by_node(roomy()) and roomy().sums_by_node
    assert "sums_by_node" not in plan_text(roomy()) and AT_ONCE not in roomy().notes
    assert make_plan(profile("a"), cluster(gib_of(roomy()))).sums_by_node


def test_without_room_for_them_they_go_over_all_devices_at_once(tmp_path: Path) -> None:
    """The same slices, with less memory and longer sums, and nothing given up."""
    short = make_plan(profile("a"), cluster(gib_of(roomy()) - 0.01))
    assert not short.sums_by_node and not goes_by_node(short)
    assert AT_ONCE in short.notes
    assert short.slices == roomy().slices
    assert short.predicted.iteration_s > roomy().predicted.iteration_s + 0.01
    assert simulate(short).iteration_s == pytest.approx(short.predicted.iteration_s, rel=0.01)
    at_once = roomy().model_copy(update={"sums_by_node": False})
    freed = communicator_bytes(roomy())[0] - communicator_bytes(at_once)[0]
    assert gib_of(roomy()) - gib_of(short) == pytest.approx(freed / GIB) and freed > 0
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(short))
    assert read_plan(path) == short and "sums_by_node: false\n" in path.read_text()
    assert check_plan(short, profile("a")) == ()
    prove(link_sets(short).whole)
    assert predicted_by(profile("a"), short).iteration_s == pytest.approx(short.predicted.iteration_s)
    assert predicted_by(profile("a"), at_once).iteration_s > predicted_by(profile("a"), roomy()).iteration_s


def test_a_plan_that_goes_by_nodes_without_the_room_is_a_violation() -> None:
    short = make_plan(profile("a"), cluster(gib_of(roomy()) - 0.01))
    by_node = short.model_copy(update={"sums_by_node": True})
    assert {found.rule for found in check_plan(by_node, profile("a"))} >= {"memory"}


def test_plans_of_sets_that_run_in_turn_go_by_nodes_together_or_not_at_all() -> None:
    sets = (TaskShare(tasks=("a",), share=0.5), TaskShare(tasks=("a", "b"), share=0.5))
    sampled = profile("a", "b").model_copy(update={"task_sets": sets})
    ample = make_plan(sampled, cluster(60))
    assert ample.sums_by_node and goes_by_node(ample)
    worst = max(max(each.predicted.peak_memory_bytes) for each in ample.task_sets)
    short = make_plan(sampled, cluster(worst / GIB - 0.01))
    assert not short.sums_by_node and not goes_by_node(short)
    assert check_plan(short, sampled) == ()
    assert short.mean_iteration_s > ample.mean_iteration_s
