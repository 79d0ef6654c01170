"""Cluster files of several types of device: their links, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.several_types import cluster_of_types
from spindle_cli.costs.links import all_gather_s, all_reduce_s, bandwidth_bytes_per_s, per_node
from spindle_cli.errors import InputError
from spindle_cli.files.cluster import MAX_DEVICES, Cluster, is_cpu
from spindle_cli.questions.edit import with_devices, with_one_more


def mixed(**changes: Any) -> dict[str, Any]:
    return {
        "schema": "spindle.cluster/1",
        "name": "mixed",
        "nodes": [
            {"name": "fast", "count": 2, "devices": 2, "device": "a100-80gb", "memory_gib": 80},
            {
                "name": "slow",
                "devices": 3,
                "device": "v100-32gb",
                "memory_gib": 32,
                "links": {"intra_node": {"latency_us": 10, "bandwidth_gb_per_s": 120}},
            },
            {"devices": 1, "device": "h20", "memory_gib": 96},
        ],
        "links": {
            "intra_node": {"latency_us": 1, "bandwidth_gb_per_s": 200},
            "inter_node": {"latency_us": 20, "bandwidth_gb_per_s": 20},
            "between": [{"groups": ["slow", "fast"], "latency_us": 30, "bandwidth_gb_per_s": 2}],
        },
        **changes,
    }


def read(**changes: Any) -> Cluster:
    return Cluster.from_data(mixed(**changes), where="c.yaml")


def test_devices_have_the_type_of_their_group() -> None:
    cluster = read()
    assert cluster.types == ("a100-80gb", "v100-32gb", "h20")
    assert cluster.type_of == ("a100-80gb",) * 4 + ("v100-32gb",) * 3 + ("h20",)
    assert cluster.num_of_type == {"a100-80gb": 4, "v100-32gb": 3, "h20": 1}
    assert cluster.is_mixed
    assert not cluster_of_types({"cpu": 2}).is_mixed
    assert not cluster.is_cpu
    assert cluster.talks_by == "nccl"


def test_the_link_of_two_devices_is_that_of_their_groups() -> None:
    cluster = read()
    speed = {
        (a, b): cluster.link(a, b).bandwidth_gb_per_s
        for a, b in ((0, 1), (1, 2), (3, 4), (4, 3), (4, 6), (4, 7), (0, 7))
    }
    assert speed == {
        (0, 1): 200,
        (1, 2): 20,
        (3, 4): 2,
        (4, 3): 2,
        (4, 6): 120,
        (4, 7): 20,
        (0, 7): 20,
    }


def test_among_nodes_the_slowest_links_count() -> None:
    cluster = read()
    links = cluster.links_among([0, 2])
    assert (links.intra_node.bandwidth_gb_per_s, links.intra_node.latency_us) == (120, 10)
    assert (links.inter_node.bandwidth_gb_per_s, links.inter_node.latency_us) == (2, 30)
    assert cluster.links_among([0, 1]).inter_node.bandwidth_gb_per_s == 20
    assert cluster.links_among([2]).intra_node.bandwidth_gb_per_s == 120


def test_two_nodes_of_a_group_have_its_own_link_between_them_and_one_has_none() -> None:
    slow = {"groups": ["fast", "fast"], "latency_us": 5, "bandwidth_gb_per_s": 1}
    cluster = read(links={**mixed()["links"], "between": [*mixed()["links"]["between"], slow]})
    speeds = {
        nodes: cluster.links_among(nodes).inter_node.bandwidth_gb_per_s
        for nodes in ((0,), (0, 1), (1, 0, 1), (0, 2), (1, 2), (0, 1, 2), (0, 3), (0, 1, 3))
    }
    assert speeds == {
        (0,): 20,  # what any two nodes have
        (0, 1): 1,
        (1, 0, 1): 1,
        (0, 2): 2,
        (1, 2): 2,
        (0, 1, 2): 1,
        (0, 3): 20,
        (0, 1, 3): 1,
    }


def test_the_longest_latency_counts_although_another_link_is_slower() -> None:
    long = {"groups": ["fast", "fast"], "latency_us": 99, "bandwidth_gb_per_s": 50}
    cluster = read(links={**mixed()["links"], "between": [*mixed()["links"]["between"], long]})
    slowest = cluster.links_among([0, 1, 2]).inter_node
    assert (slowest.latency_us, slowest.bandwidth_gb_per_s) == (99, 2)


def test_for_each_size_of_message_the_link_counts_that_is_slowest_at_it() -> None:
    """The link of the fast nodes is the slower one up to 1 MB, where both reach 120 GB/s."""
    nodes = mixed()["nodes"]
    curve = [[1e4, 20], [1e6, 120], [1e8, 200]]
    nodes[0]["links"] = {"intra_node": {"latency_us": 1, "bandwidth_gb_per_s": 200, "curve": curve}}
    inside = read(nodes=nodes).links_among([0, 2]).intra_node
    assert (inside.bandwidth_gb_per_s, inside.latency_us) == (120, 10)
    speeds = {size: bandwidth_bytes_per_s(size, inside) for size in (1e3, 1e4, 1e5, 1e6, 1e7, 1e9)}
    assert speeds == pytest.approx({1e3: 20e9, 1e4: 20e9, 1e5: 70e9, 1e6: 120e9, 1e7: 120e9, 1e9: 120e9})
    assert read(nodes=nodes).links_among([0, 1]).intra_node == read(nodes=nodes).link(0, 1)


def test_a_sum_is_as_slow_as_the_slowest_link_between_its_nodes() -> None:
    """Over the first devices of a fast and a slow node: a ring of two, each byte crosses once both ways."""
    cluster = read()
    assert all_reduce_s(2e9, (0, 4), cluster) == pytest.approx(2 * 30e-6 + 2e9 / 2e9)
    assert all_reduce_s(2e9, (0, 2), cluster) == pytest.approx(2 * 20e-6 + 2e9 / 20e9)
    assert per_node((0, 4), cluster) != per_node((0, 2), cluster)


def test_a_sum_goes_by_as_many_cards_as_its_own_nodes_have() -> None:
    """Nodes of a group with one card each slow down no sum that has no part on them, on any links."""
    nodes = [
        {"name": "fast", "count": 2, "devices": 4, "device": "a100-80gb", "memory_gib": 80},
        {"name": "slow", "devices": 4, "device": "v100-32gb", "memory_gib": 32, "nics": 1},
    ]
    links = mixed()["links"]
    for between in ([], links["between"]):
        cluster = read(nodes=nodes, links={**links, "between": between})
        alone = read(nodes=nodes[:1], links={**links, "between": []})
        assert all_reduce_s(4e9, range(8), cluster) == all_reduce_s(4e9, range(8), alone)
        assert all_gather_s(4e9, range(8), cluster) == all_gather_s(4e9, range(8), alone)
        over_both = (0, 1, 2, 3, 8, 9, 10, 11)
        slowest = cluster.links_among([0, 2])
        one_card = read(nodes=[{**nodes[0], "nics": 1}], links={**slowest.model_dump()})
        assert all_reduce_s(4e9, over_both, cluster) == all_reduce_s(4e9, range(8), one_card)


def test_one_link_is_for_nodes_of_one_group_that_is_named_twice() -> None:
    own = {"groups": ["fast", "fast"], "latency_us": 5, "bandwidth_gb_per_s": 50}
    cluster = read(links=mixed()["links"] | {"between": [own]})
    assert cluster.link(0, 2).bandwidth_gb_per_s == 50
    assert cluster.link(0, 4).bandwidth_gb_per_s == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"nodes": [*mixed()["nodes"], mixed()["nodes"][0]]},
            r"^c.yaml: nodes\[3\].name: 'fast', as nodes\[0\] is named; expected each name once: rename one",
        ),
        (
            {
                "nodes": [
                    *mixed()["nodes"],
                    {"name": "h20", "devices": 1, "device": "a100-80gb", "memory_gib": 80},
                ]
            },
            r"nodes\[3\].name: 'h20', as a group without a name is called by its devices",
        ),
        (
            {"nodes": [mixed()["nodes"][0], {"devices": 1, "device": "cpu", "memory_gib": 4}]},
            "CPUs and GPUs",
        ),
        (
            {
                "links": mixed()["links"]
                | {"between": [{"groups": ["fast", "h200"], "latency_us": 1, "bandwidth_gb_per_s": 1}]}
            },
            r"links.between\[0\].groups: no group is named 'h200'; .*fast, slow, h20",
        ),
        (
            {"links": mixed()["links"] | {"between": [{**mixed()["links"]["between"][0]}] * 2}},
            r"links.between\[1\].groups: .* for the second time",
        ),
        (
            {
                "links": mixed()["links"]
                | {"between": [{"groups": ["fast"], "latency_us": 1, "bandwidth_gb_per_s": 1}]}
            },
            "groups",
        ),
    ],
)
def test_groups_and_links_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"latency_us": 1.1e9}, "latency_us: expected a number less than or equal to 1000000000 (found"),
        (
            {"bandwidth_gb_per_s": 9e-7},
            "bandwidth_gb_per_s: expected a number greater than or equal to 1e-",
        ),
        (
            {"bandwidth_gb_per_s": 1.1e9},
            "bandwidth_gb_per_s: expected a number less than or equal to 1",
        ),
        (
            {"curve": [[1, 1e-7]]},
            "curve: expected positive bytes, and gb_per_s from 1e-06 to 1e+09, in",
        ),
        (
            {"curve": [[1, 1e10]]},
            "curve: expected positive bytes, and gb_per_s from 1e-06 to 1e+09, in",
        ),
        ({"curve": [[0, 1]]}, "curve: expected positive bytes"),
    ],
)
def test_what_is_no_link_is_refused_before_planning(own: dict[str, Any], said: str) -> None:
    links = mixed()["links"]
    for key in ("intra_node", "inter_node"):
        with pytest.raises(InputError, match=rf"^c.yaml: links.{key}.{re.escape(said)}"):
            read(links={**links, key: links[key] | own})
        ends = {"latency_us": 1e9, "bandwidth_gb_per_s": 1e-6, "curve": [[1, 1e-6], [2, 1e9]]}
        assert read(links={**links, key: ends}).link(0, 1 if key == "intra_node" else 7).latency_us == 1e9


def test_the_slowest_links_may_be_shared() -> None:
    """Two devices have half of what a file may say at least."""
    nodes = [group | {"host_links": 1} for group in mixed()["nodes"]]
    host = {"latency_us": 1, "bandwidth_gb_per_s": 1e-6}
    cluster = read(nodes=nodes, links={**mixed()["links"], "host": host})
    assert cluster.host_link is not None
    assert cluster.host_link.bandwidth_gb_per_s == pytest.approx(1e-6 / 3)


def test_a_type_has_a_name() -> None:
    nodes = [{"devices": 1, "device": "", "memory_gib": 4}]
    with pytest.raises(InputError, match=r"^c.yaml: nodes\[0\].device: expected a text of 1 or more"):
        read(nodes=nodes, links={**mixed()["links"], "between": []})


def test_a_cpu_is_one_by_its_name() -> None:
    assert is_cpu("cpu")
    assert is_cpu("cpu-slow")
    assert not is_cpu("cpuslow")
    assert cluster_of_types({"cpu": 1, "cpu-slow": 1}).is_cpu
    assert cluster_of_types({"cpu": 1, "cpu-slow": 1}).talks_by == "gloo"
    assert read().nodes[1].reserve_bytes > 0
    assert cluster_of_types({"cpu-slow": 1}).nodes[0].reserve_bytes == 0


def test_a_cluster_without_these_keys_says_nothing_of_them() -> None:
    assert set(cluster_of_types({"cpu": 2}).links.model_dump()) == {"intra_node", "inter_node"}
    again = Cluster.from_data(read().model_dump(mode="json", by_alias=True), where="again")
    assert again == read()


def test_one_more_device_joins_the_last_node_of_its_type() -> None:
    larger = with_one_more(read(), "a100-80gb")
    assert larger.node_sizes == (2, 3, 3, 1)
    assert larger.type_of == ("a100-80gb",) * 5 + ("v100-32gb",) * 3 + ("h20",)
    # the node that grew still has the links of its group
    assert larger.link(2, 5).bandwidth_gb_per_s == larger.link(0, 5).bandwidth_gb_per_s == 2
    assert with_one_more(read(), "h20").node_sizes == (2, 2, 3, 2)


@given(st.integers(1, 12))
def test_another_number_of_devices_keeps_the_links(num_devices: int) -> None:
    cluster, other = read(), with_devices(read(), num_devices)
    assert other.num_devices == num_devices
    for a in range(min(num_devices, 8)):
        for b in range(a):
            assert other.link(a, b) == cluster.link(a, b)


def test_a_group_says_its_link_to_host_memory_beside_or_without_one_inside_its_nodes() -> None:
    host = {"latency_us": 10, "bandwidth_gb_per_s": 12}
    nodes = mixed()["nodes"]
    nodes[0]["links"] = {"host": host}
    cluster = read(nodes=nodes)
    assert cluster.link(0, 1) == cluster.links.intra_node
    assert [link and link.bandwidth_gb_per_s for link in cluster.host_link_of_node] == [12, 12, None, None]
    assert cluster.knows_host_links
    assert not read().knows_host_links
    again = Cluster.from_data(cluster.model_dump(mode="json", by_alias=True), where="again")
    assert again == cluster
    assert cluster.model_dump(mode="json")["nodes"][0]["links"] == {"host": host | {"curve": None}}
    assert "host" not in cluster.model_dump(mode="json")["nodes"][1]["links"]
    only_host = [{**group, "links": {"host": host}} for group in nodes]
    assert read(nodes=only_host, links={**mixed()["links"], "between": []}).has_one_kind_of_links
    nodes[0]["links"] = {}
    with pytest.raises(InputError, match="expected intra_node, or host, or both"):
        read(nodes=nodes)


def of_gpus(count: int, devices: int) -> dict[str, Any]:
    return {"count": count, "devices": devices, "device": "h20", "memory_gib": 96}


def test_all_devices_of_all_groups_are_counted_against_the_most() -> None:
    plain = {**mixed()["links"], "between": []}
    most = [of_gpus(2**12, 8), of_gpus(2**13, 4)]
    assert read(nodes=most, links=plain).num_devices == MAX_DEVICES
    said = r"^c.yaml: nodes: 65537 devices together; at most 65536 can be planned for$"
    with pytest.raises(InputError, match=said):
        read(nodes=[*most, of_gpus(1, 1)], links=plain)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"reserve_gib": 96}, "reserve_gib: 96 of 96 GiB; expected less than memory_gib"),
        ({"reserve_gib": 97}, "reserve_gib: 97 of 96 GiB; expected less than memory_gib"),
        ({"idle_watts_per_device": 50}, "idle_watts_per_device: 50 without watts_per_device; expected both"),
        (
            {"idle_watts_per_device": 501, "watts_per_device": 500},
            "idle_watts_per_device: 501; expected at most watts_per_device, 500",
        ),
    ],
)
def test_what_a_group_cannot_have_is_refused_with_its_place(own: dict[str, Any], said: str) -> None:
    plain = {**mixed()["links"], "between": []}
    with pytest.raises(InputError, match=rf"^c.yaml: nodes\[1\]\.{re.escape(said)}"):
        read(nodes=[of_gpus(1, 1), of_gpus(1, 1) | own], links=plain)


def test_a_device_may_idle_at_its_watts_and_reserve_all_but_a_little() -> None:
    own = {"idle_watts_per_device": 500, "watts_per_device": 500, "reserve_gib": 95.5}
    cluster = read(nodes=[of_gpus(1, 1) | own], links={**mixed()["links"], "between": []})
    assert cluster.usable_bytes == (2**29,)


@pytest.mark.parametrize("curve", [[[4, 1], [4, 2]], [[4, 1], [2, 2]]])
def test_a_links_curve_ascends(curve: list[list[float]]) -> None:
    link = mixed()["links"]["inter_node"] | {"curve": curve}
    with pytest.raises(InputError, match=r"^c.yaml: links.inter_node.curve: expected ascending bytes"):
        read(links={**mixed()["links"], "inter_node": link})


@pytest.mark.parametrize("device", ["cpu", "cpu-slow"])
def test_cpus_of_any_name_do_not_talk_by_nccl(device: str) -> None:
    data = cluster_of_types({device: 2}).model_dump(mode="json", by_alias=True)
    assert Cluster.from_data(data | {"backend": "gloo"}, where="c.yaml").talks_by == "gloo"
    with pytest.raises(InputError, match=r"^c.yaml: backend: nccl moves data between GPUs only"):
        Cluster.from_data(data | {"backend": "nccl"}, where="c.yaml")
