"""Folders of runs, written as a run writes them."""

from __future__ import annotations

from pathlib import Path

from helpers.plans import two_towers
from spindle_cli.files.artifact import write_json
from spindle_cli.files.request import RunRequest, workers_dir
from spindle_cli.files.run_files import METRICS_FILE, StepMetrics
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.types import Plan


def step(number: int, loss: float = 1.0, iteration_s: float = 0.5, **more: float) -> StepMetrics:
    return StepMetrics(step=number, loss=loss, task_losses={"pairs": loss}, iteration_s=iteration_s, **more)


def launched(folder: Path, plan: Plan | None = None, steps: int = 100) -> Path:
    """A run's folder as its launcher leaves it before the first step, beside its plan."""
    run = folder / "run"
    workers_dir(run).mkdir(parents=True)
    write_plan(folder / "plan.yaml", plan or two_towers()[1])
    request = RunRequest(plan=folder / "plan.yaml", workload="w.yaml", run_dir=run, steps=steps)
    write_json(workers_dir(run) / "node-0.request.json", request)
    return run


def append(run: Path, *steps: StepMetrics, rest: str = "") -> None:
    with (run / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write("".join(each.to_line() for each in steps) + rest)
