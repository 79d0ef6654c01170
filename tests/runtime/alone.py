"""The moving workload, trained by one worker in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from case_runs import Case, prepare

from spindle_cli.files.request import RunRequest
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.runtime.worker import train_plan

ALONE = WorkerEnvironment(0, 0, 1, 1, "127.0.0.1", 0)
STEPS = 6
# The learning rate and a momentum move; one tensor of the state is not in the parameters' dtype.
TRAIN = {
    "optimizer": "NAdam",
    "schedule": {"name": "OneCycleLR", "max_lr": 0.05, "total_steps": 8},
    "clip_norm": 1.0,
}


@contextmanager
def world_of_one() -> Iterator[None]:
    """A world of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(
    folder: Path, steps: int = STEPS, train: Mapping[str, object] = TRAIN, **changes: object
) -> RunRequest:
    """Train the moving workload in a folder, which may hold a run that is gone on with."""
    case = Case("moving", (0,), function="build_moving", train=train, steps=steps, checkpoint_every=1)
    return run_case(case, folder, **changes)


def run_case(case: Case, folder: Path, **changes: object) -> RunRequest:
    """Train a case of one device in a folder, which may hold a run that is gone on with."""
    steps = case.steps
    if folder.exists():
        request = RunRequest.read(folder / "request.json").model_copy(update={"steps": steps, **changes})
    else:
        request = prepare(case, 1, folder).model_copy(update=changes)
    train_plan(request, ALONE, torch.device("cpu"))
    return request
