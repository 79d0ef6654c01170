"""On two types of CPU, in shares of unequal size: what plans do beside cutting batches is exact as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.cli import run_spindle
from spindle_cli.plan.file import read_plan
from spindle_cli.plan.types import Plan

TESTS = Path(__file__).parents[1]
ROWS_TOY = f"{TESTS / 'helpers' / 'rows_toy.py'}:build"
TINY = f"{TESTS / 'profile' / 'tiny_workload.py'}:build"
MIXTURES = TESTS.parent / "configs" / "workloads" / "bert-moe-laptop.yaml"
LINK = {"latency_us": 50, "bandwidth_gb_per_s": 1}

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ready_here")]


def write_cluster(folder: Path, new: int, old: int) -> Path:
    """A node of so many devices of each type."""
    nodes = [
        {"devices": count, "device": device, "memory_gib": 4}
        for device, count in (("cpu-new", new), ("cpu-old", old))
    ]
    links = {"intra_node": LINK, "inter_node": LINK}
    path = folder / "cluster.yaml"
    path.write_text(
        yaml.safe_dump({"schema": "spindle.cluster/1", "name": "two", "nodes": nodes, "links": links})
    )
    return path


def write_times(profile: dict[str, Any], device: str, sample_s: float, path: Path) -> None:
    """As of CPUs on which every sample of an op takes so long a pass, and half as long split in two."""
    for metaop in profile["metaops"]:
        for entry in (*metaop["curve"], *metaop["shares"]):
            samples = entry["samples"] if "samples" in entry else metaop["batch_size"] / entry["dp"]
            entry["forward_s"] = entry["backward_s"] = samples * sample_s / entry.get("tp", 1) ** 2
    path.write_text(json.dumps(profile | {"device": profile["device"] | {"type": device}}))


def planned(folder: Path, workload: str | Path, *options: object, devices: int = 1, tp: int = 1) -> Plan:
    """By the `sequential` strategy, on as many devices of each type, of which one is 2.5 times as fast."""
    cluster, new = write_cluster(folder, devices, devices), folder / "new.json"
    on = ("--cluster", cluster, "--device", "cpu-new", "--tp", tp, "--time-limit", 0.02, "--accept-noise")
    made = run_spindle("profile", workload, "-o", new, *on)
    assert made.code == 0, made.err
    profile = json.loads(new.read_text())
    write_times(profile, "cpu-new", 0.01, new)
    write_times(profile, "cpu-old", 0.025, folder / "old.json")
    both = folder / "both.json"
    merged = run_spindle("profile", "--merge", new, "--merge", folder / "old.json", "-o", both)
    assert merged.code == 0, merged.err
    plan = ("plan", both, "--cluster", cluster, "--strategy", "sequential", "-o", folder / "plan.yaml")
    ended = run_spindle(*plan, *options)
    assert ended.code == 0, ended.err
    checked = run_spindle("check", folder / "plan.yaml", "--profile", both)
    assert checked.code == 0, checked.out
    found = read_plan(folder / "plan.yaml")
    assert any(piece.rows is not None for piece in found.slices)
    return found


def require_same(folder: Path) -> None:
    """That the plan trains the same model, to 1e-12."""
    ended = run_spindle("verify", folder / "plan.yaml", "--dtype", "float64", "--steps", 2, "--json")
    assert ended.code == 0, ended.out + ended.err
    largest = [check["largest"] for check in json.loads(ended.out)["checks"] if check["largest"]]
    assert all((each["relative"] or 0.0) <= 1e-12 for each in largest), largest


@pytest.mark.parametrize("way", ["rows", "factors"])
def test_gradients_gathered_by_rows_and_as_factors(tmp_path: Path, way: str) -> None:
    plan = planned(tmp_path, ROWS_TOY, "--sums", way)
    assert {matrix.way for metaop in plan.metaops for matrix in metaop.gathered} == {way}
    require_same(tmp_path)


def test_parameters_shared_out_in_parts_by_speed(tmp_path: Path) -> None:
    plan = planned(tmp_path, TINY, "--shard", "layers=parameters", "--shard-by", "speed")
    assert (plan.sharding, plan.shard_weights) == ({"layers": "parameters"}, (5, 2))
    require_same(tmp_path)


def test_experts_shared_out_in_a_group_of_each_type(tmp_path: Path) -> None:
    """Each of the four has two experts of four. Of 16 samples the fast ones take 12, and the slow ones 4."""
    plan = planned(tmp_path, MIXTURES, devices=2, tp=2)
    assert {(piece.devices, piece.tp, piece.rows) for piece in plan.slices} == {
        ((0, 1, 2, 3), 2, (0, 12, 16))
    }
    assert {metaop.num_experts for metaop in plan.metaops} == {4}
    require_same(tmp_path)
