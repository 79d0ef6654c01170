"""Misspelt keys of files that people write are said, not passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from spindle_cli.errors import InputError
from spindle_cli.files.cluster import Cluster

LINK = {"latency_us": 1, "bandwidth_gb_per_s": 1}


def cluster(
    node: dict[str, Any] | None = None, links: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    group = {"count": 2, "devices": 4, "device": "cpu", "memory_gib": 1, **(node or {})}
    both = {"intra_node": LINK, "inter_node": LINK, **(links or {})}
    return {"schema": "spindle.cluster/1", "name": "c", "nodes": [group], "links": both, **more}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (cluster(node={"nic": 4}), "nodes[0]: unknown key 'nic'; is 'nics' meant?"),
        (
            cluster(links={"host": {**LINK, "curves": [[1, 1]]}}),
            "links.host: unknown key 'curves'; is 'curve' meant?",
        ),
        (
            cluster(node={"links": {"intra_node": LINK, "intranode": LINK}}),
            "nodes[0].links: unknown key 'intranode'",
        ),
        (cluster(back_end="gloo"), "c.yaml: unknown key 'back_end'; is 'backend' meant?"),
    ],
)
def test_a_misspelt_key_of_a_cluster_is_refused(tmp_path: Path, data: dict[str, Any], said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    with pytest.raises(InputError) as error:
        Cluster.read(path)
    assert said in error.value.message


def test_keys_that_are_like_none_of_ours_may_be_a_newer_version_s(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(cluster(node={"quota": 1}, region="eu")), encoding="utf-8")
    assert Cluster.read(path).num_devices == 8


def test_a_wrong_value_is_said_before_an_unknown_key(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(cluster(node={"memory_gib": 0, "nic": 4})), encoding="utf-8")
    with pytest.raises(InputError, match="memory_gib"):
        Cluster.read(path)
