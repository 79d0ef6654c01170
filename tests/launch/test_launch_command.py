"""`spindle launch` and `spindle verify` from end to end, with the real runtime."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.cli import run_spindle
from helpers.toy_plan import write_toy

pytestmark = pytest.mark.processes


def test_launch_trains_and_reports_in_one_json_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_toy(tmp_path)
    ended = run_spindle("launch", "plan.yaml", "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report["steps"] == 4  # as the workload's train settings say
    assert report["run_dir"] == str(tmp_path / "runs" / "toy-1")
    assert {"large", "small"} == set(report["last"]["task_losses"])
    compared = {entry["metaop"] for entry in report["predicted_vs_measured"]["metaops"]}
    assert compared == {"large/blocks", "large/head", "small/blocks", "small/head"}
    assert "training 4 steps with 2 workers" in ended.err


def test_verify_ends_with_0_for_the_same_model_and_shows_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_toy(tmp_path)
    ended = run_spindle("verify", "plan.yaml", "--dtype", "float64", "--steps", 2)
    assert ended.code == 0, ended.err
    assert "same model: toy under the spindle plan, over 2 steps on 2 workers" in ended.out
    assert "gradients of step 1" in ended.out
