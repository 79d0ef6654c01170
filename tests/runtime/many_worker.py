"""A worker that runs several requests, one after another: `many_worker.py DIR`, DIR/NN/request.json."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from spindle_cli.errors import SpindleError
from spindle_cli.files.artifact import write_json
from spindle_cli.files.request import RunRequest, error_path
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.process.worker_session import describe_error, worker_session
from spindle_cli.runtime.worker import connected, train_plan


def main(folder: Path) -> None:
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
