"""Misspelt keys of files that people write are said, not passed over; what one stage hands to the next may
have a newer version's keys anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact, _models_in
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.file import plan_text, read_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile
from spindle_cli.workload.file import WorkloadFile
from spindle_cli.workload.settings.types import LocalSgd, OuterSettings
from spindle_cli.workload.settings.updates import Schedule

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


def models_in(model: type[BaseModel], seen: set[type[BaseModel]] | None = None) -> Iterator[type[BaseModel]]:
    """A file's model, and all that are anywhere inside of it, once each."""
    seen = set() if seen is None else seen
    if model in seen:
        return
    seen.add(model)
    yield model
    for field in model.model_fields.values():
        for inner in _models_in(field.annotation):
            yield from models_in(inner, seen)


def refuses_unknown(model: type[BaseModel]) -> bool:
    """Whether a mapping is refused for a key that is like none of ours, and not for those that it lacks."""
    try:
        model.model_validate({"zzz": 1})
    except ValidationError as error:
        return any("zzz" in problem["loc"] or "'zzz'" in problem["msg"] for problem in error.errors())
    return False


@pytest.mark.parametrize(
    ("file", "refusing"),
    # Settings of `train` that are handed on would be other settings without what is not known.
    [(Profile, {LocalSgd, OuterSettings}), (Plan, {LocalSgd, OuterSettings}), (Cluster, set())],
)
def test_newer_keys_are_passed_over_anywhere_in_what_is_handed_on(
    file: type[Artifact], refusing: set[type[BaseModel]]
) -> None:
    assert {model for model in models_in(file) if refuses_unknown(model)} == refusing


def test_unknown_keys_are_refused_anywhere_below_the_top_of_a_workload_file() -> None:
    """Those of a schedule are its class's arguments."""
    assert {model for model in models_in(WorkloadFile) if not refuses_unknown(model)} == {
        WorkloadFile,
        Schedule,
    }


def test_profiles_and_plans_read_as_they_are_with_newer_keys_in_what_ops_are_tied_to(tmp_path: Path) -> None:
    words = {"op": 0, "parameter": "words", "num_bytes": 8, "keys": ("t/net", "t/head")}
    profile = profile_of(metaop_of("t/net", 1, {1: 1.0}, tied=(words,), param_bytes_per_op=8))
    (net,) = profile.metaops
    plan = plan_of(profile, cluster_of(1), [[slice_of(net, (0, 1), (0,), 0.0)]])
    profile_path, plan_path = tmp_path / "profile.json", tmp_path / "plan.yaml"
    for data, path in (
        (json.loads(profile.model_dump_json(by_alias=True)), profile_path),
        (yaml.safe_load(plan_text(plan)), plan_path),
    ):
        data["metaops"][0]["tied"][0]["held_by"] = {"devices": [0]}
        path.write_text(json.dumps(data), encoding="utf-8")
    assert Profile.read(profile_path) == profile
    assert read_plan(plan_path) == plan
