"""Rules of activations in host memory: each way to break one is named with its place."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from helpers.plans import two_towers
from helpers.several_types import metaop_on_types, plan_in_rows
from spindle_cli.check.run import check_plan
from spindle_cli.files.cluster import GroupLinks, Link, NodeGroup
from spindle_cli.plan.file import plan_text
from spindle_cli.plan.types import Plan
from spindle_cli.units import MIB

FAST, SLOW = "a100-80gb", "v100-32gb"
HOST = Link(latency_us=10, bandwidth_gb_per_s=25)


def edited(offload: list[list[int]], *, recompute: bool = False) -> Plan:
    """The two-tower plan, the first slice of its first wave with these ranges, of ops [0, 3)."""
    data = two_towers()[1].model_dump(mode="json", by_alias=True)
    data["waves"][0]["slices"][0] |= {"offload": offload, "recompute": recompute}
    return Plan.model_validate(data)


def rules(plan: Plan) -> list[str]:
    return [violation.rule for violation in check_plan(plan)]


def on(plan: Plan, link: Link | None = None, **group: Any) -> Plan:
    """The same on a cluster with another link to host memory, and nodes that differ so."""
    cluster = plan.cluster
    (first,) = cluster.nodes
    nodes = (NodeGroup(**{**first.model_dump(), **group}),)
    links = cluster.links.model_copy(update={"host": link})
    return plan.model_copy(update={"cluster": cluster.model_copy(update={"nodes": nodes, "links": links})})


@pytest.mark.parametrize("offload", [[[0, 3]], [[0, 1], [2, 3]], [[0, 1], [1, 3]]])
def test_ranges_of_the_slices_own_ops_are_sound(offload: list[list[int]]) -> None:
    # On a CPU copies are in the device's memory: it peaks higher than the plan says, and nothing else.
    assert set(rules(edited(offload))) <= {"peak-memory"}


@pytest.mark.parametrize(
    "offload",
    [
        [[0, 4]],
        [[3, 4]],
        [[1, 1]],
        [[2, 1]],
        [[0, 2], [1, 3]],
        [[2, 3], [0, 1]],
        [[0, 1], [0, 1]],
    ],
)
def test_other_ranges_are_refused(offload: list[list[int]]) -> None:
    (violation,) = check_plan(edited(offload))
    assert violation.rule == "offload"
    assert str(offload) in violation.value
    assert "of its ops [0, 3)" in violation.expected


@pytest.mark.parametrize("offload", [[[0]], [[-1, 2]], ["0-2"], [[0, 2, 3]], [[0.5, 1]], [0, 2]])
def test_what_is_no_range_is_no_plan(offload: Any) -> None:
    with pytest.raises(ValidationError, match="offload"):
        edited(offload)


def test_gpus_need_a_link_to_host_memory() -> None:
    plan = edited([[0, 1]])
    gpus = {"device": "a800-80gb", "memory_gib": 80.0}
    assert "offload" in rules(on(plan, **gpus))
    assert "offload" not in rules(on(plan, HOST, **gpus))
    assert "offload" not in rules(plan)


def on_two_types(fast: Link | None, slow: Link | None, **slow_group: Any) -> Plan:
    """A slice of three ops, all moved: of 8 samples 6 on an A100 and 2 on a V100."""
    metaop = metaop_on_types("t/net", 3, {FAST: 1.0, SLOW: 3.0}, activation_bytes_per_op=8 * MIB)
    plan = plan_in_rows(metaop, (0, 6, 8))
    own = zip(plan.cluster.nodes, (fast, slow), strict=True)
    groups = [
        group.model_copy(update={"links": None if link is None else GroupLinks(host=link)})
        for group, link in own
    ]
    nodes = (groups[0], NodeGroup(**{**groups[1].model_dump(), **slow_group}))
    waves = [
        wave.model_copy(
            update={"slices": [each.model_copy(update={"offload": ((0, 3),)}) for each in wave.slices]}
        )
        for wave in plan.waves
    ]
    return plan.model_copy(update={"cluster": plan.cluster.changed(nodes=nodes), "waves": tuple(waves)})


def test_the_type_of_device_whose_nodes_have_no_link_is_named() -> None:
    (violation,) = [each for each in check_plan(on_two_types(HOST, None)) if each.rule == "offload"]
    assert violation.devices == (1,)
    assert violation.value == f"offload, and 'mixed' has no links.host for {SLOW}"
    (violation,) = [each for each in check_plan(on_two_types(None, None)) if each.rule == "offload"]
    assert violation.devices == (0, 1)
    assert violation.value == "offload, and 'mixed' has no links.host"
    assert "offload" not in rules(on_two_types(HOST, HOST))


def test_a_node_of_one_type_has_to_hold_its_own_devices_shares() -> None:
    """Two of 8 samples: 2 MiB an op, in a block each."""
    needed_gib = 3 * 2 * MIB / 2**30
    assert "host-memory" not in rules(on_two_types(HOST, HOST, host_memory_gib=needed_gib))
    (violation,) = [
        each
        for each in check_plan(on_two_types(HOST, HOST, host_memory_gib=0.999 * needed_gib))
        if each.rule == "host-memory"
    ]
    assert violation.where == "host memory of node 1"


def test_what_a_node_has_too_little_memory_for_is_named() -> None:
    """Three ops in a block of 2 MiB each, on each of the slice's devices."""
    plan = edited([[0, 3]])
    count = len(plan.slices[0].devices)
    needed_gib = 3 * 2 * count * MIB / 2**30
    gpus = {"device": "a800-80gb", "memory_gib": 80.0}
    assert "host-memory" not in rules(on(plan, HOST, **gpus, host_memory_gib=needed_gib))
    assert "host-memory" in rules(on(plan, HOST, **gpus, host_memory_gib=0.999 * needed_gib))
    assert "host-memory" not in rules(on(plan, HOST, **gpus))


def test_ops_that_are_moved_are_not_recomputed_and_the_others_take_their_time() -> None:
    """The slice's 3 ops are planned to last what they take once: with recomputation only a plan that moves
    all of them lasts long enough.
    """
    assert "duration" in rules(edited([[0, 2]], recompute=True))
    assert "duration" not in rules(edited([[0, 3]], recompute=True))


def test_a_plan_that_moves_nothing_says_nothing_of_it() -> None:
    assert "offload" not in plan_text(two_towers()[1])
    assert "offload: [[0, 1], [2, 3]]" in plan_text(edited([[0, 1], [2, 3]]))


@pytest.mark.parametrize(
    ("key", "value"),
    [("host_memory_gib", 0), ("host_memory_gib", -1), ("host_links", 0), ("host_links", 1.5)],
)
def test_nodes_without_host_memory_or_links_are_no_nodes(key: str, value: float) -> None:
    with pytest.raises(ValidationError, match=key):
        NodeGroup(devices=2, device="a800-80gb", memory_gib=80, **{key: value})
