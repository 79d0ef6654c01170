"""The folder of a run: chosen so that no run writes over another."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.errors import InputError, UsageError
from spindle_cli.files.artifact import to_compact_json
from spindle_cli.files.request import (
    error_path,
    journal_path,
    memo_path,
    pid_path,
    stack_path,
    stop_path,
    workers_dir,
)
from spindle_cli.files.writing import write_text
from spindle_cli.launch.types import Launch

if TYPE_CHECKING:
    from spindle_cli.workload.memo import AnalysisMemo

RUNS = Path("runs")


def choose_run_dir(workload: str, wanted: Path | None, *, resume: bool, node_rank: int) -> Path:
    """The folder of this node's run; it may not exist yet.

    Without `wanted`: the first of runs/<workload>-1, -2, ... in which this node has no run, so that nodes
    with one shared disk and nodes with a disk each agree; to resume, the last one in which it has.

    Raises:
        UsageError: `wanted` holds something already, or there is no run to resume.
    """
    name = re.sub(r"[^\w.-]+", "-", workload) or "run"
    if resume:
        found = wanted or _last_run(name, node_rank)
        if found is None or not found.is_dir():
            raise UsageError(
                f"--resume: there is no run in {found or RUNS / (name + '-*')}",
                hint="Give the folder of the run to resume with --run-dir.",
            )
        return found
    if wanted is not None:
        if wanted.exists() and not wanted.is_dir():
            raise UsageError(f"--run-dir {wanted}: it is a file, not a folder", hint="Choose another name.")
        if is_taken(wanted, node_rank):
            raise UsageError(
                f"--run-dir {wanted}: there is a run in it already",
                hint="Choose another folder, or add --resume to go on with that run.",
            )
        return wanted
    number = 1
    while is_taken(RUNS / f"{name}-{number}", node_rank):
        number += 1
    return RUNS / f"{name}-{number}"


def _last_run(name: str, node_rank: int) -> Path | None:
    runs = [path for path in RUNS.glob(f"{name}-*") if path.name.removeprefix(f"{name}-").isdecimal()]
    runs = [path for path in runs if is_taken(path, node_rank)]
    return max(runs, key=lambda path: int(path.name.removeprefix(f"{name}-")), default=None)


def hand_on(launch: Launch, memo: AnalysisMemo) -> Launch:
    """The same launch, whose workers read what was just found of the workload. The folder is there."""
    path = memo_path(launch.run_dir, launch.node_rank)
    write_text(path, to_compact_json(memo))
    return launch.model_copy(update={"request": launch.request.model_copy(update={"memo": path})})


def is_taken(run_dir: Path, node_rank: int) -> bool:
    """Whether this node must not start a run here: it has one, or the folder holds something else."""
    if not run_dir.exists():
        return False
    if not run_dir.is_dir() or (workers_dir(run_dir) / f"node-{node_rank}.request.json").exists():
        return True
    started_by_others = any(workers_dir(run_dir).glob("node-*.request.json"))
    return not started_by_others and any(run_dir.iterdir())


def prepare_run_dir(run_dir: Path) -> None:
    """Make the folder and its workers/.

    Raises:
        InputError: it cannot be made or written.
    """
    try:
        workers_dir(run_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{run_dir}: the run's folder cannot be made: {error.strerror}",
            hint="Choose a folder on a disk that can be written, with --run-dir.",
        ) from error


def discard_unused(run_dir: Path) -> None:
    """Remove the folder of a run that was ended by hand before its first step: the next try may have it."""
    if [path.name for path in run_dir.iterdir()] == [workers_dir(run_dir).name]:
        shutil.rmtree(run_dir)


def forget_attempt(run_dir: Path, ranks: range, node_rank: int) -> None:
    """Remove what this node's workers left behind when the run was tried before: errors, exits, stacks."""
    for rank in ranks:
        for path_of in (error_path, pid_path, stack_path, journal_path):
            path_of(run_dir, rank).unlink(missing_ok=True)
    (workers_dir(run_dir) / f"node-{node_rank}.exits.json").unlink(missing_ok=True)


def forget_errors(run_dir: Path) -> None:
    """Remove what an earlier part of a resumed run has left behind, and what asked it to stop."""
    endings = ("error.json", "pid", "stack", "journal", "room")
    for pattern in (*(f"rank-*.{ending}" for ending in endings), "node-*.exits.json"):
        for path in workers_dir(run_dir).glob(pattern):
            path.unlink(missing_ok=True)
    stop_path(run_dir).unlink(missing_ok=True)
