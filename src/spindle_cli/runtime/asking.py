"""What a script asks of its `Trainer` under plain torchrun, as the request that `launch` would make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from spindle_cli.errors import InputError, UsageError
from spindle_cli.files.request import RunRequest, workers_dir
from spindle_cli.files.run_files import METRICS_FILE
from spindle_cli.plan.file import read_plan, write_plan
from spindle_cli.plan.types import Plan
from spindle_cli.workload.building.source import locate

_PLAN_FILE = "plan.yaml"


@dataclass(frozen=True)
class Asked:
    """The arguments of a `Trainer`."""

    plan: str | Path | Plan | None
    run_dir: str | Path | None
    workload: str | None
    steps: int | None
    resume: bool
    checkpoint_every: int | None
    keep: int
    timeout_s: float


def request_by_hand(asked: Asked) -> RunRequest:
    """The run's folder, made, and the request; to be called by every rank before they meet.

    Raises:
        UsageError: no plan or no folder is named, there is a run in the folder, or a number is too small.
        InputError: the plan or the workload is missing, or the folder cannot be made.
    """
    if asked.plan is None or asked.run_dir is None:
        missing = "plan" if asked.plan is None else "run_dir"
        raise UsageError(
            f"spindle.Trainer: no {missing} is given, and no `spindle launch` has started this process",
            hint='Write spindle.Trainer("plan.yaml", run_dir="runs/mine"), or start the script with '
            "`spindle launch SCRIPT.py --plan PLAN.yaml`.",
        )
    for name in ("steps", "checkpoint_every", "keep", "timeout_s"):
        number = getattr(asked, name)
        if number is not None and number <= 0:
            raise UsageError(f"spindle.Trainer: {name}={number}: expected a number above 0")
    run_dir = Path(asked.run_dir).absolute()
    if not asked.resume and (run_dir / METRICS_FILE).exists():
        raise UsageError(
            f"{run_dir}: there is a run in this folder already",
            hint="Choose another run_dir, or go on with that run with resume=True.",
        )
    try:
        workers_dir(run_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{run_dir}: cannot be made: {error.strerror}") from error
    path = _plan_file(asked.plan, run_dir)
    plan = read_plan(path)
    folders = () if asked.workload else (path.parent,)
    return RunRequest(
        plan=path,
        workload=locate(asked.workload or plan.workload.source, folders),
        steps=asked.steps,
        run_dir=run_dir,
        resume=asked.resume,
        checkpoint_every=asked.checkpoint_every,
        keep=asked.keep,
        device_type="cpu" if plan.cluster.is_cpu else "cuda",
        backend=plan.cluster.talks_by,
        threads=torch.get_num_threads(),
        timeout_s=asked.timeout_s,
        islands=1 if plan.local_sgd is None else plan.local_sgd.islands,
    )


def _plan_file(plan: str | Path | Plan, run_dir: Path) -> Path:
    """Where the plan is; one that is in no file is written into the run's folder."""
    if not isinstance(plan, Plan):
        return Path(plan).absolute()
    path = run_dir / _PLAN_FILE
    write_plan(path, plan)
    return path
