"""Why a run failed: of everything that went wrong, the one thing that the rest follows from."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from spindle_cli.errors import ExitCode, RunFailedError
from spindle_cli.launch.types import Launch, WorkerExit, WorkerExits
from spindle_cli.request import WorkerError, log_path, workers_dir

TAIL_LINES = 12


def read_errors(run_dir: Path) -> tuple[WorkerError, ...]:
    """What the workers that died left behind, in order of time."""
    errors = [WorkerError.read(path) for path in workers_dir(run_dir).glob("rank-*.error.json")]
    return tuple(sorted(errors, key=lambda error: error.time_s))


def failure_of(launch: Launch) -> RunFailedError:
    """The failure of a run that has ended badly, as one message."""
    errors = read_errors(launch.run_dir)
    exits = WorkerExits.read(launch.exits_file).exits if launch.exits_file.exists() else ()
    return describe_failure(launch, errors, exits)


def describe_failure(
    launch: Launch, errors: Sequence[WorkerError], exits: Sequence[WorkerExit]
) -> RunFailedError:
    """The first cause among errors and deaths, as one message.

    A worker's death breaks its peers' connections, and the first error makes torchrun end the others with
    SIGTERM: neither of these is a cause while there is another.
    """
    explained = {error.rank for error in errors}
    original = [error for error in errors if not error.lost_peer]
    deaths = [died for died in exits if died.rank not in explained and died.exit_code != -signal.SIGTERM]
    death = min(deaths, key=lambda died: died.time_s, default=None)
    if original and (death is None or original[0].time_s < death.time_s):
        return _of_error(launch, original[0])
    if death is not None:
        return _of_death(launch, death)
    if errors:
        return _of_lost_peer(launch, errors[0])
    return _of_launcher(launch)


def _of_error(launch: Launch, error: WorkerError) -> RunFailedError:
    log = log_path(launch.run_dir, error.rank)
    if error.self_explaining:
        stopped = error.exit_code == ExitCode.STOPPED  # of all workers together, not of this one
        message = error.message if stopped else f"worker {error.rank}: {error.message}"
        failure = RunFailedError(message, hint=error.hint)
        failure.exit_code = ExitCode(error.exit_code)
        return failure
    place = f"\n  at {error.place}" if error.place else ""
    message = f"worker {error.rank} failed: {error.type}: {error.message}{place}"
    return RunFailedError(message, hint=f"The whole traceback is in {log}")


def _of_death(launch: Launch, died: WorkerExit) -> RunFailedError:
    log = log_path(launch.run_dir, died.rank)
    if died.exit_code == -signal.SIGKILL:
        return RunFailedError(
            f"worker {died.rank} was killed by signal 9 (out of memory?)",
            hint="The kernel kills what takes too much memory (see `dmesg`), and so may a job scheduler.",
        )
    if died.exit_code < 0:
        name = signal.Signals(-died.exit_code).name
        message = f"worker {died.rank} was killed by signal {-died.exit_code} ({name})"
    else:
        message = f"worker {died.rank} ended with exit code {died.exit_code} and no error of its own"
    source = log if _tail(log) else launch.log  # what fails before a worker has its log is in the node's
    return RunFailedError(f"{message}{_indented(_tail(source))}", hint=f"From {source}")


def _of_lost_peer(launch: Launch, error: WorkerError) -> RunFailedError:
    if launch.num_nodes > 1:
        hint = "No worker of this node failed by itself: see the other nodes' output, and the network."
    else:
        hint = f"No worker said why; their output is in {workers_dir(launch.run_dir)}"
    return RunFailedError(
        f"worker {error.rank} lost its connection to another worker: {error.message}", hint=hint
    )


def _of_launcher(launch: Launch) -> RunFailedError:
    return RunFailedError(
        f"the workers could not be started or ended without an error{_indented(_tail(launch.log))}",
        hint=f"From {launch.log}; each worker's output is beside it.",
    )


def _tail(path: Path) -> list[str]:
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-TAIL_LINES:]


def _indented(lines: list[str]) -> str:
    return "".join(f"\n  | {line}" for line in lines)
