"""What would run, compared whole: as data, and as the shell script that `--dry-run` prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers.cli import run_spindle
from helpers.plans import two_towers
from helpers.toy_plan import write_toy
from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.launch.build import build_again, build_launch
from spindle_cli.launch.run_dir import hand_on
from spindle_cli.launch.types import Address, LaunchOptions, NodeShare

LOOPBACK = NodeShare(0, 1, 2, Address("127.0.0.1", 0), "lo")


def test_dry_run_prints_the_whole_launch_as_json_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("spindle_cli.launch.devices.usable_cores", lambda: 2)
    write_toy(tmp_path)
    ended = run_spindle("launch", "plan.yaml", "--dry-run", "--json")
    run_dir = tmp_path / "runs" / "toy-1"
    request_file = str(run_dir / "workers" / "node-0.request.json")
    exits_file = str(run_dir / "workers" / "node-0.exits.json")
    assert json.loads(ended.out) == {
        "schema": "spindle.launch/1",
        "num_nodes": 1,
        "node_rank": 0,
        "processes": 2,
        "run_dir": str(run_dir),
        "request_file": request_file,
        "request": {
            "schema": "spindle.run-request/1",
            "plan": str(tmp_path / "plan.yaml"),
            "workload": str(tmp_path / "toy.yaml"),
            "memo": None,
            "steps": 4,
            "run_dir": str(run_dir),
            "resume": False,
            "resume_step": None,
            "begin_from": None,
            "begin_step": None,
            "checkpoint_every": None,
            "keep": 3,
            "async_checkpoints": False,
            "datasets": {},
            "device_type": "cpu",
            "backend": "gloo",
            "threads": 1,
            "timeout_s": 600.0,
            "dtype": None,
            "no_randomness": False,
            "timeline_steps": 3,
            "traces": False,
            "begun_s": None,
            "started_s": None,
            "islands": 1,
            "island": 0,
            "outer_every": None,
            "script": None,
            "script_args": [],
            "capture_dir": None,
        },
        "environment": {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        "argv": [
            sys.executable,
            "-m",
            "spindle_cli.launch.starting.torchrun",
            exits_file,
            "--nnodes=1",
            "--nproc-per-node=2",
            "--rdzv-backend=spindle",
            "--rdzv-endpoint=127.0.0.1:0",
            "--rdzv-conf=rank=0",
            "--max-restarts=0",
            "--start-method=fork",
            "-m",
            "spindle_cli.runtime.worker",
            request_file,
        ],
        "log": str(run_dir / "workers" / "node-0.log"),
        "exits_file": exits_file,
        "restarts": 3,
    }
    assert (ended.code, ended.err) == (0, "")
    assert not (tmp_path / "runs").exists()


def test_the_script_is_what_the_launch_says() -> None:
    _, plan = two_towers()
    options = LaunchOptions(steps=7)
    launch = build_launch(plan, Path("/plan.yaml"), "toy:build", Path("/a run"), LOOPBACK, options)
    lines = launch.shell_script().splitlines()
    assert lines[:3] == [
        "# 2 workers on cpu, gloo",
        "mkdir -p '/a run/workers'",
        "cat > '/a run/workers/node-0.request.json' <<'END'",
    ]
    assert lines[-4:] == [
        "END",
        "env OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo \\",
        f"  {sys.executable} -m spindle_cli.launch.starting.torchrun '/a run/workers/node-0.exits.json'"
        " --nnodes=1 --nproc-per-node=2 --rdzv-backend=spindle --rdzv-endpoint=127.0.0.1:0 --rdzv-conf=rank=0"
        " --max-restarts=0 --start-method=fork -m spindle_cli.runtime.worker"
        " '/a run/workers/node-0.request.json' \\",
        "  > '/a run/workers/node-0.log' 2>&1",
    ]
    assert json.loads("\n".join(lines[3:-4]))["steps"] == 7


def test_a_run_that_is_started_again_analyses_its_workload_anew(tmp_path: Path) -> None:
    """Its files may have changed since the launcher looked."""
    _, plan = two_towers()
    launch = build_launch(plan, Path("/plan.yaml"), "toy:build", tmp_path, LOOPBACK, LaunchOptions())
    launch.request_file.parent.mkdir()
    memo = AnalysisMemo(torch_version="2.13", observed={}, findings={}, mixes={})
    told = hand_on(launch, memo)
    assert told.request.memo is not None
    assert AnalysisMemo.read(told.request.memo) == memo
    assert build_again(told, 3).request.memo is None


def test_gpus_get_nccl_on_the_same_interface() -> None:
    _, plan = two_towers()
    node = plan.cluster.nodes[0].model_copy(update={"device": "h100"})
    gpus = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"nodes": (node,)})})
    share = NodeShare(1, 2, 2, Address("10.0.0.1", 29500), "eth1")
    launch = build_launch(gpus, Path("/plan.yaml"), "toy:build", Path("/run"), share, LaunchOptions())
    assert (launch.request.device_type, launch.request.backend) == ("cuda", "nccl")
    assert launch.environment["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert launch.environment["GLOO_SOCKET_IFNAME"] == "eth1"
    assert {"--nnodes=2", "--rdzv-endpoint=10.0.0.1:29500", "--rdzv-conf=rank=1"} <= set(launch.argv)
    assert launch.request_file.name == "node-1.request.json"
