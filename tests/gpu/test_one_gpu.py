"""The CUDA path on one device: profile, plan, training over NCCL, verification, and going on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.cli import run_spindle
from helpers.gpu import cluster_file
from spindle_cli.files.run_files import PREDICTED_FILE, PredictedVsMeasured
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

WORKLOAD = Path(__file__).parents[2] / "configs" / "workloads" / "digits.yaml"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cluster of this machine's first GPU, a profile measured on it, and a plan."""
    folder = tmp_path_factory.mktemp("gpu")
    profile, cluster = folder / "profile.json", cluster_file(folder, 1)
    arguments = ("--nproc", 1, "--time-limit", 0.1, "--accept-noise")
    assert run_spindle("profile", WORKLOAD, "-o", profile, *arguments).code == 0
    assert run_spindle("plan", profile, "--cluster", cluster, "-o", folder / "plan.yaml").code == 0
    return folder


def test_curves_are_measured_on_the_device(files: Path) -> None:
    profile = Profile.read(files / "profile.json")
    assert profile.device.type == "cuda"
    assert profile.device.name == torch.cuda.get_device_name(0)
    assert profile.environment["cuda"] == torch.version.cuda
    points = [metaop.curve[0] for metaop in profile.metaops]
    assert {point.source for point in points} == {"measured"}
    assert all(point.forward_s > 0 for point in points)
    assert all(metaop.activation_bytes_per_op > 0 for metaop in profile.metaops)


def test_training_by_a_plan_is_plain_training(files: Path) -> None:
    ended = run_spindle("verify", files / "plan.yaml", "--steps", 2, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["same"] is True


def test_a_run_reports_predicted_against_measured_and_goes_on(files: Path) -> None:
    run_dir = files / "run"
    assert run_spindle("launch", files / "plan.yaml", "--run-dir", run_dir, "--steps", 6).code == 0
    iteration = PredictedVsMeasured.read(run_dir / PREDICTED_FILE).iteration
    assert iteration.measured_s > 0
    assert iteration.predicted_s == Plan.read(files / "plan.yaml").predicted.iteration_s
    again = ("--run-dir", run_dir, "--steps", 8, "--resume")
    assert run_spindle("launch", files / "plan.yaml", *again).code == 0
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))


def test_a_plan_for_more_devices_than_there_are_is_refused(files: Path) -> None:
    larger = cluster_file(files, torch.cuda.device_count() + 1)
    plan = files / "larger-plan.yaml"
    assert run_spindle("plan", files / "profile.json", "--cluster", larger, "-o", plan).code == 0
    refused = run_spindle("launch", plan, "--run-dir", files / "refused")
    assert refused.code == 3
    assert f"found {torch.cuda.device_count()}" in refused.err
