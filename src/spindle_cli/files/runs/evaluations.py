"""evaluations.jsonl: a line for each task that was evaluated, and when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Model, validate
from spindle_cli.files.parsing import parse_json
from spindle_cli.files.run_files import Loss
from spindle_cli.files.writing import written_whole

EVALUATIONS_FILE = "evaluations.jsonl"


class Evaluation(Model):
    """A line of evaluations.jsonl: a task evaluated on a dataset.

    Attributes:
        step: steps that were done. `task`: its name.
        num_samples: in the dataset, each of them evaluated once.
        loss: the mean over the samples of their batch's loss, as forward computes it for a batch of that
            size; with `reduction="sum"` the sum of the batches' losses.
        metrics: what the task's functions give of what forward has returned for all samples.
        seconds: wall clock.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=True)

    step: Annotated[int, Field(ge=0)]
    task: str
    num_samples: Annotated[int, Field(ge=1)]
    loss: Loss
    metrics: dict[str, Loss] = Field(default_factory=dict)
    seconds: Annotated[float, Field(ge=0)]

    def to_line(self) -> str:
        """One line of JSON with its newline; every finite number reads back as it was."""
        return json.dumps(self.model_dump(mode="json"), allow_nan=False) + "\n"


class EvaluationTimes(Model):
    """How long a task's evaluations on so many samples were predicted to take, and took.

    Attributes:
        task: The task.
        num_samples: On how many samples.
        times: How often it was evaluated.
        predicted_s: Predicted seconds; null: the plan does not know what the task takes.
        measured_s: The median of the seconds that they took.
    """

    task: str
    num_samples: Annotated[int, Field(ge=1)]
    times: Annotated[int, Field(ge=1)]
    predicted_s: Annotated[float, Field(ge=0)] | None
    measured_s: Annotated[float, Field(ge=0)]


def read_evaluations(run_dir: Path) -> Iterator[Evaluation]:
    """Every whole line of a run's evaluations.jsonl, in file order; none where there is no such file.

    Raises:
        InputError: it cannot be read, or a line is not one.
    """
    path = run_dir / EVALUATIONS_FILE
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path}:{number}"
        yield validate(Evaluation, parse_json(line, where=where), where=where)


def forget_evaluations_after(run_dir: Path, step: int) -> None:
    """Leave out the lines of evaluations after more than `step` steps, which are done again, and one that is
    not whole.

    Raises:
        InputError: the file cannot be read or written, or a line is not one.
    """
    path = run_dir / EVALUATIONS_FILE
    if not path.exists():
        return
    kept = [evaluation for evaluation in read_evaluations(run_dir) if evaluation.step <= step]
    with written_whole(path) as file:
        file.write("".join(evaluation.to_line() for evaluation in kept).encode())


def append_evaluation(run_dir: Path, evaluation: Evaluation) -> None:
    """Add a line.

    Raises:
        InputError: the disk is full, or the file is not writable.
    """
    path = run_dir / EVALUATIONS_FILE
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(evaluation.to_line())
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
