"""What a run writes down as it goes on, and how to follow it: each whole line of a file that another process
still writes, once, as they come; and how long the run will still take.

workers/attempts.jsonl: when its workers were started, from which step and why, and how it ended.
evaluations.jsonl: a line for each task that was evaluated, and when.
timeline.json: what every device did in the last steps, moment by moment, on one clock; rank 0 of the runtime
writes it; `launch --trace` and `report` read it.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact, Model, Sparse, parse_json, shown, validate
from spindle_cli.files.request import workers_dir
from spindle_cli.files.run_files import Loss
from spindle_cli.files.writing import written_whole

CHUNK_BYTES = 2**20
# Of what has been read, so much is looked at again to tell a file that was written anew in its place.
ANCHOR_BYTES = 256
# Steps over which the pace is taken: enough to be calm, few enough to follow a change.
RECENT_STEPS = 20


@dataclass(frozen=True)
class NewLines:
    """What one look has found.

    Attributes:
        begun_anew: the file is another one than at the last look: everything read before is void.
        lines: by number from 1, without their ends.
        left_bytes: that a further look would read at once.
    """

    begun_anew: bool
    lines: tuple[tuple[int, bytes], ...]
    left_bytes: int


class Tail:
    """Hands out each line of a growing file once; a line without its end waits for the rest of it."""

    def __init__(self, path: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.path = path
        self._chunk_bytes = chunk_bytes
        self._identity: tuple[int, int] | None = None
        self._restart()

    def _restart(self) -> None:
        self.offset = 0
        self._rest = b""
        self._number = 0
        self._anchor = b""

    def rewind(self) -> None:
        """Hand all lines out once more, from the file's beginning."""
        self._restart()

    def look(self) -> NewLines:
        """At most a chunk of what is new. A file that is not there has no lines.

        Raises:
            InputError: it cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                file.seek(self.offset - len(self._anchor))
                is_other = identity != self._identity or file.read(len(self._anchor)) != self._anchor
                anew = is_other and self.offset > 0
                if is_other:
                    self._restart()
                    self._identity = identity
                file.seek(self.offset)
                read = file.read(self._chunk_bytes)
        except FileNotFoundError:
            anew = self.offset > 0
            self._restart()
            return NewLines(anew, (), 0)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}") from error
        self.offset += len(read)
        self._anchor = (self._anchor + read)[-ANCHOR_BYTES:]
        *whole, self._rest = (self._rest + read).split(b"\n")
        first = self._number + 1
        self._number += len(whole)
        return NewLines(anew, tuple(enumerate(whole, start=first)), max(status.st_size - self.offset, 0))


class Pace:
    """The usual time of a run's latest steps, and what comes between them."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._first_s: float | None = None
        self._inside_s = self._outside_s = 0.0
        self._steps = 0

    def add(self, iteration_s: float, seen_s: float | None = None) -> None:
        """One step more; `seen_s`: when it was seen to have ended, where somebody looks all the time."""
        self._recent.append(iteration_s)
        if seen_s is None:
            return
        if self._first_s is None:
            self._first_s = seen_s
            return
        self._steps += 1
        self._inside_s += iteration_s
        self._outside_s = seen_s - self._first_s - self._inside_s

    @property
    def between_s(self) -> float:
        """The seconds between one step and the next that are part of neither, in the mean since the first
        step seen.
        """
        return max(self._outside_s, 0.0) / self._steps if self._steps else 0.0

    @property
    def step_s(self) -> float | None:
        """The median of the latest steps; None before the first."""
        return statistics.median(self._recent) if self._recent else None

    def left_s(self, steps_left: int, between_s: float = 0.0) -> float | None:
        """Seconds until the last step ends; None before the first one has.

        `between_s`: of each step in the mean, what is no part of it: evaluations, checkpoints.
        """
        step_s = self.step_s
        return None if step_s is None else (step_s + between_s) * max(steps_left, 0)


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
