"""Seconds of a step whose samples take 5 ms each, without loader workers and with them, in turns.

`python scripts/bench_loading.py`: about a minute. A sample sleeps while it is read, so that the figures
do not depend on how many cores there are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import Dataset

from spindle_cli.files.run_files import read_metrics
from spindle_cli.workload.types import Task, Workload

ROOT = Path(__file__).parent.parent
DECODE_S = 0.005
BATCH, WIDTH, STEPS, WORKERS, TURNS = 16, 64, 40, 8, 2


class Slow(Dataset[dict[str, Tensor]]):
    """Samples that take their time, as pictures do."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(DECODE_S)
        return {"x": torch.full((WIDTH,), index / 4096)}


class Net(nn.Module):
    """Two layers, and how large what they give is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        loss: Tensor = self.layers(x).square().mean()
        return loss


def build() -> Workload:
    """One task of slow samples."""
    return Workload("slow-samples", [Task("slow", Net(), BATCH, Slow())], operators=(nn.Linear,))


def spindle(*words: object) -> None:
    """Run a command; its output is shown if it fails."""
    command = [sys.executable, "-m", "spindle_cli", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def step_s(folder: Path, workers: int) -> tuple[float, float]:
    """Median seconds of a step, and of its wait for data."""
    source = folder / f"workers-{workers}.yaml"
    train = {"steps": STEPS, "optimizer": "SGD", "lr": 0.1, "loader": {"workers": workers}}
    model = f"{Path(__file__).absolute()}:build"
    source.write_text(yaml.safe_dump({"schema": "spindle.workload/1", "model": model, "train": train}))
    plan, run = folder / "plan.yaml", folder / "run"
    if not plan.exists():
        cluster = ROOT / "configs/clusters/cpu-2.yaml"
        spindle("profile", source, "--estimate", "--cluster", cluster, "-o", folder / "profile.json")
        spindle("plan", folder / "profile.json", "--cluster", cluster, "-o", plan)
    shutil.rmtree(run, ignore_errors=True)
    spindle("launch", plan, "--workload", source, "--run-dir", run)
    steps = list(read_metrics(run))[STEPS // 2 :]  # what is ready ahead is used up
    return median(s.iteration_s for s in steps), median(s.data_wait_s or 0.0 for s in steps)


def main() -> None:
    """Print a line for each number of workers."""
    with tempfile.TemporaryDirectory() as name:
        runs = [(workers, *step_s(Path(name), workers)) for _ in range(TURNS) for workers in (0, WORKERS)]
    for workers in (0, WORKERS):
        steps = [step for each, step, _ in runs if each == workers]
        waits = [wait for each, _, wait in runs if each == workers]
        print(
            f"{workers} loader workers: a step of {BATCH} samples takes {1e3 * median(steps):.1f} ms "
            f"({', '.join(f'{1e3 * step:.1f}' for step in steps)}), "
            f"{1e3 * median(waits):.1f} ms of it waiting for data"
        )


if __name__ == "__main__":
    main()
