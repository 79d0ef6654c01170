"""A worker that runs several requests, one after another: `-m many_worker DIR`, DIR/NN/request.json."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from host_waits import no_host_waits

from spindle_cli.errors import SpindleError
from spindle_cli.files.artifact import write_json
from spindle_cli.files.request import RunRequest, error_path
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.process.worker_session import describe_error, worker_session
from spindle_cli.runtime.connecting import connected
from spindle_cli.runtime.training import Training
from spindle_cli.runtime.worker import train_plan


def step_without_host_waits(self: Training, step: int, *, is_first: bool) -> None:
    # The second is like all that follow; the first compiles and makes what is made once.
    with no_host_waits() if step == 1 and not is_first else nullcontext():
        train_one_step(self, step, is_first=is_first)


train_one_step = Training.step


def main(argv: list[str]) -> None:
    folder = Path(argv[1])
    Training.step = step_without_host_waits
    environment = WorkerEnvironment.read()
    requests = [RunRequest.read(path) for path in sorted(folder.glob("[0-9]*/request.json"))]
    device = torch.device("cpu")
    torch.set_num_threads(1)
    with worker_session(folder, environment.rank), connected(requests[0], environment, device):
        for request in requests:
            try:
                train_plan(request, environment, device)
            except SpindleError as error:  # of the kinds that every worker ends with at the same point
                path = error_path(request.run_dir, environment.rank)
                path.parent.mkdir(exist_ok=True)
                write_json(path, describe_error(error, environment.rank))
