"""The folder of a run: made, looked at, and tidied up."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import to_compact_json
from spindle_cli.files.request import (
    done_path,
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
    from spindle_cli.analysis.memo import AnalysisMemo

CLAIM = "owner-"  # how the names of claims to a folder begin (owner.py)


def prepare_run_dir(run_dir: Path) -> Path:
    """Make a run's folder and its workers/, which is returned.

    Raises:
        InputError: it cannot be made or written.
    """
    folder = workers_dir(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{run_dir}: the run's folder cannot be made: {error.strerror}",
            hint="Choose a folder on a disk that can be written, with --run-dir.",
        ) from error
    return folder


def has_run(run_dir: Path) -> bool:
    """Whether there is anything in a folder but claims to it."""
    workers = workers_dir(run_dir)
    if not run_dir.is_dir():
        return run_dir.exists()
    if any(path != workers for path in run_dir.iterdir()):
        return True
    return workers.is_dir() and any(not _is_of_claims(path.name) for path in workers.iterdir())


def _is_of_claims(name: str) -> bool:
    return name.startswith((CLAIM, ".spindle-"))


def hand_on(launch: Launch, memo: AnalysisMemo) -> Launch:
    """Let a launch's workers read what was just found of the workload. The run's folder is there already."""
    path = memo_path(launch.run_dir, launch.node_rank)
    write_text(path, to_compact_json(memo))
    return launch.model_copy(update={"request": launch.request.model_copy(update={"memo": path})})


def discard_unused(run_dir: Path) -> None:
    """Remove the folder of a run that was ended by hand before its first step: the next try may have it."""
    if [path.name for path in run_dir.iterdir()] == [workers_dir(run_dir).name]:
        shutil.rmtree(run_dir)


def forget_attempt(run_dir: Path, ranks: range, node_rank: int) -> None:
    """Remove what this node's workers left behind when the run was tried before: errors, exits, stacks."""
    for rank in ranks:
        for path_of in (error_path, done_path, pid_path, stack_path, journal_path):
            path_of(run_dir, rank).unlink(missing_ok=True)
    (workers_dir(run_dir) / f"node-{node_rank}.exits.json").unlink(missing_ok=True)


def forget_errors(run_dir: Path) -> None:
    """Remove what an earlier part of a resumed run has left behind, and what asked it to stop."""
    endings = ("error.json", "done", "pid", "stack", "journal", "room")
    for pattern in (*(f"rank-*.{ending}" for ending in endings), "node-*.exits.json"):
        for path in workers_dir(run_dir).glob(pattern):
            path.unlink(missing_ok=True)
    stop_path(run_dir).unlink(missing_ok=True)
