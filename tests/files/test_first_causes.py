"""What is wrong inside of a list is said once, not of the list too."""

from __future__ import annotations

import pytest

from spindle_cli.errors import InputError
from spindle_cli.files.cluster import Cluster

LINK = {"latency_us": 1, "bandwidth_gb_per_s": 1}
GOOD = {"count": 1, "devices": 1, "device": "cpu", "memory_gib": 1}


def refused(nodes: list[object]) -> list[str]:
    data = {
        "schema": "spindle.cluster/1",
        "name": "c",
        "nodes": nodes,
        "links": {"intra_node": LINK, "inter_node": LINK},
    }
    with pytest.raises(InputError) as error:
        Cluster.from_data(data, where="c.yaml")
    return error.value.message.splitlines()


def test_a_wrong_node_is_one_line() -> None:
    (line,) = refused([{**GOOD, "devices": 0}])
    assert line.startswith("c.yaml: nodes[0].devices: ")


def test_no_nodes_at_all_are_said() -> None:
    (line,) = refused([])
    assert line.startswith("c.yaml: nodes: ")
