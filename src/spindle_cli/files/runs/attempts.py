"""workers/attempts.jsonl: when a run's workers were started, from which step and why, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Model, validate
from spindle_cli.files.parsing import parse_json
from spindle_cli.files.request import workers_dir
from spindle_cli.files.runs.tail import Tail

ATTEMPTS_FILE = "attempts.jsonl"


class AttemptEvent(Model):
    """A line of attempts.jsonl.

    Attributes:
        event: the workers are about to be started; or there will be no further attempt: the run has done its
            steps, has failed, or was asked to end before.
        time_s: seconds since the epoch.
        step: of `started`, the steps that are done already: of the checkpoint that it goes on from.
        total_steps: of `started`, at which the run ends, where that is known.
        message: of `started`, why the attempt before it failed; of `failed` and `stopped`, why.
    """

    event: Literal["started", "done", "failed", "stopped"]
    time_s: Annotated[float, Field(ge=0)]
    step: Annotated[int, Field(ge=0)] = 0
    total_steps: Annotated[int, Field(ge=1)] | None = None
    message: str | None = None


def attempts_path(run_dir: Path) -> Path:
    """Where node 0's launcher notes its attempts."""
    return workers_dir(run_dir) / ATTEMPTS_FILE


def note_started(run_dir: Path, step: int, total_steps: int, cause: str | None) -> None:
    """Note that the workers are about to be started; `cause`: why the attempt before failed.

    Raises:
        InputError: the file cannot be written.
    """
    event = AttemptEvent(
        event="started", time_s=time.time(), step=step, total_steps=total_steps, message=cause
    )
    _append(run_dir, event)


def note_ended(run_dir: Path, event: Literal["done", "failed", "stopped"], message: str | None) -> None:
    """Note how the run has ended; nothing where its folder is gone.

    Raises:
        InputError: the file cannot be written.
    """
    if workers_dir(run_dir).is_dir():
        _append(run_dir, AttemptEvent(event=event, time_s=time.time(), message=message))


def read_attempts(run_dir: Path) -> Iterator[AttemptEvent]:
    """Every whole line, in order of time; none where there is no such file (runs of older versions).

    Raises:
        InputError: it cannot be read, or a line is not one.
    """
    tail = Tail(attempts_path(run_dir))
    left = True
    while left:
        new_lines = tail.look()
        left = new_lines.left_bytes > 0
        for number, line in new_lines.lines:
            where = f"{tail.path}:{number}"
            text = line.decode(errors="replace")
            yield validate(AttemptEvent, parse_json(text, where=where), where=where)


def _append(run_dir: Path, event: AttemptEvent) -> None:
    path = attempts_path(run_dir)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(event.model_dump_json(exclude_defaults=True) + "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
