"""What a run writes down as it goes on.

workers/attempts.jsonl: when its workers were started, from which step and why, and how it ended.
evaluations.jsonl: a line for each task that was evaluated, and when.
timeline.json: what every device did in the last steps, moment by moment, on one clock; rank 0 of the runtime
writes it; `launch --trace` and `report` read it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact, Model, Sparse, validate
from spindle_cli.files.parsing import parse_json, shown
from spindle_cli.files.request import workers_dir
from spindle_cli.files.run_files import Loss
from spindle_cli.files.runs.tail import Tail
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


TIMELINE_FILE = "timeline.json"

WaitCause = Literal["activation", "gradient", "leaving", "sum", "losses", "norm", "islands"]


class MeasuredSpan(Sparse):
    """Something that a device did from `start_s` to `end_s`.

    Attributes:
        kind: Forward and backward compute `slice`. A transfer takes an activation from `source_slice` to
            `slice`, or a gradient back the same way; it lasts from when this device, its sender, posts it to
            when the taker has it and uses it. A sum is of a parameter group's gradients, a gather of its new
            values. Data: waiting for the input pipeline.
        start_s: When it began.
        end_s: When it ended.
        slice: Of a wait, the slice that waits; None: the step.
        source_slice: Where a transfer comes from.
        is_gradient: Whether a transfer is on the way back.
        cause: Of a wait, what is waited for; before a slice or one of its ops runs forward that may also be
            new values of its parameters. `leaving`: what the device has sent, and gives up.
        peer: Of a transfer, the device that takes it.
        group: Of a sum or gather, which of the parameter groups of all programs.
        num_bytes: Of transfers, sums and gathers; of transfers as the plan predicts them.
    """

    kind: Literal["forward", "backward", "wait", "data", "optimizer", "transfer", "sum", "gather"]
    start_s: float
    end_s: float
    slice: int | None = None
    source_slice: int | None = None
    is_gradient: bool = False
    cause: WaitCause | None = None
    peer: int | None = None
    group: int | None = None
    num_bytes: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        needed = {
            "forward": {"slice"},
            "backward": {"slice"},
            "transfer": {"slice", "peer"},
            "wait": {"cause"},
        }
        missing = [name for name in sorted(needed.get(self.kind, ())) if getattr(self, name) is None]
        if missing:
            raise ValueError(f"a {self.kind} without its {' and '.join(missing)}")
        return self


class MeasuredStep(Sparse):
    """One step, or one of the batches of a step that has several, as long as it took rank 0.

    Attributes:
        step: Which step, counted from 1.
        start_s: When it began.
        end_s: When it ended.
        devices: Each device's spans, by their start.
    """

    step: Annotated[int, Field(ge=1)]
    start_s: float
    end_s: float
    devices: tuple[tuple[MeasuredSpan, ...], ...]


class MeasuredTimeline(Artifact):
    """timeline.json. Seconds since rank 0 began the first of `steps`.

    Attributes:
        plan_sha256: of the plan that was run; slices are its slices, and behind them what plans for sets of
            its tasks have besides (`Plan.every_slice`).
        clock_error_s: no device's times are further off rank 0's clock than this.
        steps: consecutive, the run's last.
    """

    KIND: ClassVar[str] = "timeline"

    schema_: Annotated[Literal["spindle.timeline/1"], Field(alias="schema")] = "spindle.timeline/1"
    plan_sha256: str
    clock_error_s: Annotated[float, Field(ge=0)]
    steps: tuple[MeasuredStep, ...]

    def require_of(self, plan_sha256: str, num_slices: int, num_devices: int, *, where: Path) -> None:
        """Refuse a timeline of another plan's run; `where`: its file.

        Raises:
            InputError: it is one.
        """
        hint = "Give the folder of a run by this plan."
        if self.plan_sha256 != plan_sha256:
            raise InputError(
                f"{where}: it is of a run by another plan ({shown(self.plan_sha256[:19])}..., "
                f"this one is {plan_sha256[:19]}...)",
                hint=hint,
            )
        for step in self.steps:
            if len(step.devices) != num_devices:
                raise InputError(
                    f"{where}: step {step.step} has {len(step.devices)} devices, the plan {num_devices}",
                    hint=hint,
                )
            for span in (span for spans in step.devices for span in spans):
                _require_within(span.slice, num_slices, "slice", where)
                _require_within(span.source_slice, num_slices, "slice", where)
                _require_within(span.peer, num_devices, "device", where)


def _require_within(number: int | None, count: int, what: str, where: Path) -> None:
    if number is not None and not 0 <= number < count:
        raise InputError(f"{where}: {what} {number} is not in the plan, which has {count}")
