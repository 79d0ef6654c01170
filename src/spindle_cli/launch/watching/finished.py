"""Whether a run whose processes have all ended with exit code 0 has done its work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from spindle_cli.errors import RunFailedError
from spindle_cli.files.request import done_path, log_path
from spindle_cli.files.run_files import METRICS_FILE, last_step, model_path
from spindle_cli.launch.types import Launch

_HINT = "Leave the run's folder to the run while it goes on; --resume goes on from a checkpoint that is left."


def require_done(launch: Launch, ranks: Iterable[int]) -> None:
    """Make sure that every worker of this node has come to the end of its work.

    Raises:
        RunFailedError: one has not.
    """
    for rank in ranks:
        if not done_path(launch.run_dir, rank).exists():
            raise left_early(launch.run_dir, rank)


def left_early(run_dir: Path, rank: int) -> RunFailedError:
    """What it means that a worker has ended without an error, and not at its end."""
    return RunFailedError(
        f"worker {rank} ended with exit code 0 before its work was done",
        hint="Code that a workload loads or runs must not end the process (os._exit): let it raise an error "
        f"instead. The worker's output is in {log_path(run_dir, rank)}",
    )


def require_trained(run_dir: Path, steps: int) -> None:
    """Make sure that a run has left the metrics of its last step, and the model after it; where rank 0 is.

    Raises:
        RunFailedError: it has not.
    """
    last = last_step(run_dir)
    if last != steps:
        reached = "is not there, or empty" if last is None else f"ends with step {last} of {steps}"
        raise RunFailedError(
            f"{run_dir / METRICS_FILE}: {reached}, although every worker has come to its end", hint=_HINT
        )
    model = model_path(run_dir, steps)
    if not model.is_file():
        raise RunFailedError(f"{model}: no such file, although every worker has come to its end", hint=_HINT)
