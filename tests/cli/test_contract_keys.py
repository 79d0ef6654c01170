"""Files with the contract's keys alone, as another tool may write them, are taken by every command."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from helpers.cli import run_spindle
from spindle_cli.plan.types import Plan

CURVE = """[
 {"num_devices": 1, "dp": 1, "tp": 1, "forward_s": 0.01, "backward_s": 0.02, "source": "measured"},
 {"num_devices": 2, "dp": 2, "tp": 1, "forward_s": 0.006, "backward_s": 0.011, "source": "composed"}]"""

PROFILE = f"""{{
 "schema": "spindle.profile/1",
 "workload": {{"name": "w", "fingerprint": "sha256:abc", "source": "w.yaml"}},
 "device": {{"type": "cpu", "name": "c", "memory_bytes": 8589934592}},
 "environment": {{"torch": "2", "threads_per_process": 1}},
 "metaops": [
  {{"name": "t/vision", "task": "t", "num_ops": 2, "batch_size": 8, "inputs": [], "parameters": "vision",
    "param_bytes_per_op": 1000, "activation_bytes_per_op": 1000, "output_bytes": 500, "curve": {CURVE}}},
  {{"name": "t/loss", "task": "t", "num_ops": 1, "batch_size": 8, "inputs": ["t/vision"], "parameters": null,
    "param_bytes_per_op": 0, "activation_bytes_per_op": 10, "output_bytes": 4, "curve": {CURVE}}}]}}"""

CLUSTER = """\
schema: spindle.cluster/1
name: two
nodes:
  - {count: 1, devices: 2, device: cpu, memory_gib: 8}
links:
  intra_node: {latency_us: 8.4, bandwidth_gb_per_s: 160}
  inter_node: {latency_us: 14, bandwidth_gb_per_s: 46}
"""

PLAN = """\
schema: spindle.plan/1
strategy: spindle
workload: {{name: w, fingerprint: "sha256:abc", source: w.yaml}}
profile: {{sha256: {sha256}}}
cluster:
{cluster}
predicted: {{iteration_s: 0.064, compute_s: 0.064, lower_bound_s: 0.051, peak_memory_bytes: [5, 5]}}
waves:
  - index: 0
    start_s: 0.0
    end_s: 0.034
    slices:
      - {{metaop: t/vision, ops: [0, 2], devices: [0-1], dp: 2, tp: 1, start_s: 0.0, end_s: 0.034}}
  - index: 1
    start_s: 0.034
    end_s: 0.064
    slices:
      - {{metaop: t/loss, ops: [0, 1], devices: [1], dp: 1, tp: 1, start_s: 0.034, end_s: 0.064}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "profile.json").write_text(PROFILE)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    sha256 = hashlib.sha256(PROFILE.encode()).hexdigest()  # as `sha256sum` prints it
    cluster = "\n".join(f"  {line}" for line in CLUSTER.splitlines())
    (tmp_path / "plan.yaml").write_text(PLAN.format(sha256=sha256, cluster=cluster))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "plan profile.json --cluster cluster.yaml -o made.yaml",
        "compare profile.json --cluster cluster.yaml",
        "sweep profile.json --cluster cluster.yaml",
        "check plan.yaml",
        "check plan.yaml --profile profile.json",
        "show plan.yaml",
        "diff plan.yaml plan.yaml",
        "explain plan.yaml --profile profile.json",
        "report plan.yaml --profile profile.json -o report.html",
    ],
)
def test_files_with_the_contracts_keys_alone_are_enough(folder: Path, command: str) -> None:
    for extra in ((), ("--json",)):
        ended = run_spindle(*command.split(), *extra)
        assert ended.code == 0, ended
        if extra:
            assert json.loads(ended.out)["schema"].startswith("spindle.")


@pytest.mark.parametrize(
    "command", ["simulate plan.yaml", "explain plan.yaml", "show plan.yaml --rank 0", "launch plan.yaml"]
)
def test_commands_that_need_more_say_how_to_add_it(folder: Path, command: str) -> None:
    ended = run_spindle(*command.split())
    assert ended.code == 3
    assert "plan.yaml: the key 'metaops' is missing" in ended.err
    assert "spindle check plan.yaml --profile PROFILE.json -o COMPLETE.yaml" in ended.err


def test_check_completes_a_plan_from_its_profile(folder: Path) -> None:
    checked = run_spindle("check", "plan.yaml", "--profile", "profile.json", "-o", "complete.yaml")
    assert checked.code == 0, checked
    for command in (
        "check complete.yaml --profile profile.json",
        "simulate complete.yaml",
        "explain complete.yaml",
    ):
        ended = run_spindle(*command.split())
        assert (ended.code, ended.err) == (0, "")
    complete = Plan.read(Path("complete.yaml"))
    assert [metaop.name for metaop in complete.metaops] == ["t/vision", "t/loss"]
    assert complete.threads_per_process == 1
    assert complete.waves == Plan.read(Path("plan.yaml")).waves


@pytest.mark.parametrize(
    ("found", "replacement", "rule", "profile_needed"),
    [
        ("devices: [1]", "devices: [2]", "unknown-device", False),
        ("ops: [0, 2]", "ops: [1, 2]", "coverage", False),
        ("dp: 2", "dp: 1", "allocation", False),
        ("devices: [1], dp: 1", "devices: [1, 1], dp: 2", "device-twice", False),
        ("start_s: 0.034, end_s: 0.064", "start_s: 0.03, end_s: 0.064", "device-busy", False),
        ("compute_s: 0.064", "compute_s: 0.06", "compute", False),
        ("[5, 5]", "[5]", "peak-memory", False),
        ("ops: [0, 2]", "ops: [0, 1]", "coverage", True),
        ("end_s: 0.064}", "end_s: 0.05}", "duration", True),
        ("metaop: t/loss", "metaop: t/lost", "unknown-metaop", True),
    ],
)
def test_violations_are_found_as_far_as_can_be_told(
    folder: Path, found: str, replacement: str, rule: str, profile_needed: bool
) -> None:
    path = folder / "plan.yaml"
    assert found in path.read_text()
    path.write_text(path.read_text().replace(found, replacement))
    alone = run_spindle("check", path)
    assert "no key 'metaops'" in alone.err
    if not profile_needed:
        assert alone.code == 1
        assert f"[{rule}]" in alone.out
    ended = run_spindle("check", path, "--profile", folder / "profile.json", "-o", folder / "complete.yaml")
    assert ended.code == 1
    assert f"[{rule}]" in ended.out
    assert ended.err == ""  # nothing is missing with a profile
    assert not (folder / "complete.yaml").exists()


def test_a_profile_of_another_workload_is_refused(folder: Path) -> None:
    (folder / "profile.json").write_text(PROFILE.replace("sha256:abc", "sha256:abd"))
    for command in ("check plan.yaml", "explain plan.yaml", "report plan.yaml -o report.html"):
        ended = run_spindle(*command.split(), "--profile", "profile.json")
        assert ended.code == 3
        assert ended.err.startswith("error: profile.json: a profile of workload 'w'")
