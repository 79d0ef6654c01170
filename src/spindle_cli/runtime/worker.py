"""One worker, started by torchrun once per device: `python -m spindle_cli.runtime.worker REQUEST.json`.

It is a user of the `Trainer` that scripts use: it trains all steps of a request, or runs a script of the
user's that `spindle launch` was given.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

from spindle_cli.errors import RunFailedError
from spindle_cli.files.request import RunRequest
from spindle_cli.process.environment import REQUEST_VARIABLE, WorkerEnvironment, join_environment
from spindle_cli.process.worker_session import worker_session
from spindle_cli.runtime.measuring.start_up import StartClock
from spindle_cli.runtime.saving.stopping import StopRequest
from spindle_cli.runtime.trainer import Trainer


def main(argv: list[str]) -> None:
    """Run one worker; its errors end in its `WorkerError` file and its exit code."""
    request = RunRequest.read(Path(argv[1]))
    environment = WorkerEnvironment.read()
    with worker_session(request.run_dir, environment.rank):
        if request.script is not None:
            run_script(request, Path(argv[1]))
        else:
            run(request, environment)


def run(request: RunRequest, environment: WorkerEnvironment) -> None:
    """Train this rank's part of the plan.

    Raises:
        InputError: the plan is invalid, or does not belong to the workload or to this number of workers.
        WorkloadError: the workload cannot be built, traced or trained as its settings say.
        RunFailedError: training failed: a loss that is not finite, a lost worker.
    """
    with Trainer.of_request(request, environment) as trainer:
        trainer.train()


def train_plan(
    request: RunRequest,
    environment: WorkerEnvironment,
    device: torch.device,
    stop: StopRequest | None = None,
    clock: StartClock | None = None,
) -> None:
    """Train as one of workers that are connected already; raises what `run` raises."""
    with Trainer.of_connected(request, environment, device, stop, clock) as trainer:
        trainer.train()


def run_script(request: RunRequest, request_file: Path) -> None:
    """Run the request's script as Python runs it, with its folder in front of all that is imported from.

    Raises:
        RunFailedError: it has ended with an exit code of its own.
        Exception: what it raises.
    """
    assert request.script is not None, "there is a script"
    join_environment({REQUEST_VARIABLE: str(request_file)})
    sys.argv = [str(request.script), *request.script_args]
    sys.path.insert(0, str(request.script.parent))
    try:
        runpy.run_path(str(request.script), run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise RunFailedError(f"{request.script}: sys.exit({ended.code!r}) was called") from ended


if __name__ == "__main__":
    main(sys.argv)
