"""Within a step the host never waits for a GPU, by torch's own account of what does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.cli import run_spindle
from spindle_cli.files.request import RunRequest
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.runtime.connecting import connected
from spindle_cli.runtime.training import Training
from spindle_cli.runtime.worker import train_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

CONFIGS = Path(__file__).parents[2] / "configs"


def test_no_step_but_the_first_waits_for_the_device(
    tmp_path: Path, gpu_cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one loads kernels and takes memory from the driver."""
    workload, profile, plan = CONFIGS / "workloads" / "digits.yaml", tmp_path / "p.json", tmp_path / "p.yaml"
    limits = ("--nproc", 1, "--time-limit", 0.05, "--accept-noise", "--no-check")
    assert run_spindle("profile", workload, "-o", profile, *limits).code == 0
    assert run_spindle("plan", profile, "--cluster", gpu_cluster, "-o", plan).code == 0
    (tmp_path / "run" / "workers").mkdir(parents=True)
    request = RunRequest(
        plan=plan,
        workload=str(workload),
        steps=4,
        run_dir=tmp_path / "run",
        device_type="cuda",
        backend="nccl",
    )
    watched: list[int] = []
    step = Training.step

    def strict(self: Training, number: int, *, is_first: bool) -> None:
        torch.cuda.set_sync_debug_mode("default" if is_first else "error")
        try:
            step(self, number, is_first=is_first)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        watched.append(number)

    monkeypatch.setattr(Training, "step", strict)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    environment, device = WorkerEnvironment(0, 0, 1, 1, "127.0.0.1", 0), torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with connected(request, environment, device):
        train_plan(request, environment, device)
    assert watched == [0, 1, 2, 3]
