"""How a run whose processes have ended has ended: whether it has done its work; and if not, of everything
that went wrong, the one thing that the rest follows from.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

from spindle_cli.errors import ExitCode, RunFailedError, WorkerLostError
from spindle_cli.files.request import WorkerError, done_path, log_path, pid_path, stack_path, workers_dir
from spindle_cli.files.run_files import METRICS_FILE, last_step, model_path
from spindle_cli.launch.types import Launch, WorkerExit, WorkerExits
from spindle_cli.launch.watching.stuck import StuckWorker, doing_of_all
from spindle_cli.units import format_seconds

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


TAIL_LINES = 12


def read_errors(run_dir: Path) -> tuple[WorkerError, ...]:
    """What the workers that died left behind, in order of time."""
    errors = [WorkerError.read(path) for path in workers_dir(run_dir).glob("rank-*.error.json")]
    return tuple(sorted(errors, key=lambda error: error.time_s))


def failure_of(
    launch: Launch, stuck: Sequence[StuckWorker] = (), *, code: int = 1, ranks: Iterable[int] = ()
) -> RunFailedError:
    """The failure of a run that has ended badly, as one message.

    Args:
        stuck: workers that did not move.
        code: how the process ended that starts the workers.
        ranks: of this node's workers.
    """
    errors = read_errors(launch.run_dir)
    worker_exits = (
        WorkerExits.read(launch.exits_file) if launch.exits_file.exists() else WorkerExits(exits=())
    )
    if worker_exits.problem is not None and not errors:
        return WorkerLostError(worker_exits.problem, hint="See the other nodes' output, and the network.")
    if code < 0 and not errors and not worker_exits.exits:
        return _of_killed_command(-code)
    if launch.exits_file.exists() and all(error.lost_peer for error in errors) and not stuck:
        accounted = {error.rank for error in errors} | {died.rank for died in worker_exits.exits}
        for rank in ranks:
            begun, done = pid_path(launch.run_dir, rank), done_path(launch.run_dir, rank)
            if rank not in accounted and begun.exists() and not done.exists():
                return left_early(launch.run_dir, rank)
    return describe_failure(launch, errors, worker_exits.exits, stuck)


def _of_killed_command(number: int) -> RunFailedError:
    """The workers ended with it, and had no time to say anything."""
    name = _signal_name(number)
    return WorkerLostError(
        f"the process that starts the workers (torchrun) was killed by signal {number} ({name})",
        hint="The kernel kills what takes too much memory (see `dmesg`), and so may a job scheduler.",
    )


def describe_failure(
    launch: Launch,
    errors: Sequence[WorkerError],
    exits: Sequence[WorkerExit],
    stuck: Sequence[StuckWorker] = (),
) -> RunFailedError:
    """The first cause among errors, deaths and workers that hang, as one message.

    A worker's death breaks its peers' connections, one that hangs lets its peers give up, and the first error
    makes torchrun end the others: none of these follow-ups is a cause while there is another.

    Returns:
        `WorkerLostError` where to start again may help.
    """
    original = [error for error in errors if not error.lost_peer]
    death = _first_death(exits, {error.rank for error in errors}, {worker.rank for worker in stuck})
    if original and (death is None or original[0].time_s < death.time_s):
        return _of_error(launch, original[0])
    if death is not None:
        return _of_death(launch, death)
    if stuck:
        return _of_stuck(launch, stuck)
    if errors:
        return _of_lost_peer(launch, errors[0])
    if exits:
        return _of_death(launch, exits[0])
    return _of_launcher(launch)


def _first_death(exits: Sequence[WorkerExit], explained: set[int], hanging: set[int]) -> WorkerExit | None:
    """The first worker that died by itself: without an error, and not as torchrun ends the others.

    Args:
        explained: ranks of workers that left an error.
        hanging: ranks of workers that did not move.
    """
    by_torchrun = {-signal.SIGTERM}
    if hanging:  # torchrun kills those that do not end by themselves
        by_torchrun |= {-signal.SIGKILL, -signal.SIGABRT}
    deaths = [
        died for died in exits if died.rank not in explained | hanging and died.exit_code not in by_torchrun
    ]
    return min(deaths, key=lambda died: died.time_s, default=None)


def _of_error(launch: Launch, error: WorkerError) -> RunFailedError:
    log = log_path(launch.run_dir, error.rank)
    if error.self_explaining:
        stopped = error.exit_code == ExitCode.STOPPED  # of all workers together, not of this one
        message = error.message if stopped else f"worker {error.rank}: {error.message}"
        failure = (WorkerLostError if error.may_pass else RunFailedError)(message, hint=error.hint)
        failure.exit_code = ExitCode(error.exit_code)
        return failure
    place = f"\n  at {error.place}" if error.place else ""
    message = f"worker {error.rank} failed: {error.type}: {error.message}{place}"
    kind = WorkerLostError if error.may_pass else RunFailedError
    return kind(message, hint=f"The whole traceback is in {log}")


def _of_stuck(launch: Launch, stuck: Sequence[StuckWorker]) -> RunFailedError:
    timeout = format_seconds(launch.request.timeout_s)
    places = "; ".join(f"worker {worker.rank} hangs at {worker}" for worker in stuck)
    logs = " and ".join(str(stack_path(launch.run_dir, worker.rank)) for worker in stuck)
    return WorkerLostError(
        f"{places}: no answer within the run's timeout of {timeout}",
        hint=f"The whole stack is in {logs}; where a step takes that long, give more time with --timeout.",
    )


def _of_death(launch: Launch, died: WorkerExit) -> RunFailedError:
    log = log_path(launch.run_dir, died.rank)
    if died.exit_code == -signal.SIGKILL:
        return WorkerLostError(
            f"worker {died.rank} was killed by signal 9 (out of memory?)",
            hint="The kernel kills what takes too much memory (see `dmesg`), and so may a job scheduler.",
        )
    if died.exit_code < 0:
        name = _signal_name(-died.exit_code)
        message = f"worker {died.rank} was killed by signal {-died.exit_code} ({name})"
        if died.exit_code == -signal.SIGABRT:  # as NCCL's watchdog ends a worker whose peers do not answer
            message += _where_all(launch)
    else:
        message = f"worker {died.rank} ended with exit code {died.exit_code} and no error of its own"
    source = log if _tail(log) else launch.log  # what fails before a worker has its log is in the node's
    kind = WorkerLostError if died.exit_code < 0 else RunFailedError
    return kind(f"{message}{_indented(_tail(source))}", hint=f"From {source}")


def _signal_name(number: int) -> str:
    names = {member.value: member.name for member in signal.Signals}
    return names.get(number, "which has no name")


def _of_lost_peer(launch: Launch, error: WorkerError) -> RunFailedError:
    if launch.num_nodes > 1:
        hint = "No worker of this node failed by itself: see the other nodes' output, and the network."
    else:
        hint = f"No worker said why; their output is in {workers_dir(launch.run_dir)}"
    message = f"worker {error.rank} lost its connection to another worker: {error.message}"
    return WorkerLostError(message + _where_all(launch), hint=hint)


def _where_all(launch: Launch) -> str:
    """What every worker of this node was doing, a line each; the one that is furthest behind is asked for."""
    activities = doing_of_all(launch.run_dir)
    return "".join(f"\n  worker {rank} was at {what}" for rank, what in activities.items())


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
