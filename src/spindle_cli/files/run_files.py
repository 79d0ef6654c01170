"""What a run leaves in its folder: a line per step; each worker's journal of where its host is and how far
its device has come; at the end parameters, and predicted against measured.

Rank 0 of the runtime writes them, but for the journals; `launch`, `verify` and `report` read them.

A journal is one small file per worker, mapped into its memory, so that a note is a store and is there for
others to read whatever the worker hangs in, and after its process has been aborted.

    magic, batches of a step; begun: batch, action, time; done: batch, action, time; one line for each action
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact, Model, parse_json, validate
from spindle_cli.files.writing import written_whole
from spindle_cli.units import counted

_MAGIC = b"spindle1"
_HEADER = struct.Struct("<8sq")
_NOTE = struct.Struct("<qqd")
_BEGUN = _HEADER.size
_DONE = _BEGUN + _NOTE.size
_LABELS = _DONE + _NOTE.size
_NOTHING = -1


@dataclass(frozen=True)
class Note:
    """`batch`: of the run, counted from 0; `action`: of the program; `time_s`: since the epoch."""

    batch: int
    action: int
    time_s: float


class JournalWriter:
    """A worker's side."""

    def __init__(
        self, path: Path, actions: Sequence[str], batches_per_step: int, first_batch: int = 0
    ) -> None:
        """Begin anew.

        Args:
            path: of the file.
            actions: what each is, for people, without line breaks.
            batches_per_step: of every task.
            first_batch: of this run.
        """
        labels = "\n".join(actions).encode()
        notes = _NOTE.pack(_NOTHING, _NOTHING, 0.0) + _NOTE.pack(first_batch - 1, len(actions) - 1, 0.0)
        path.write_bytes(_HEADER.pack(_MAGIC, batches_per_step) + notes + labels)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def begun(self, note: Note) -> None:
        """The host is at an action."""
        _NOTE.pack_into(self._memory, _BEGUN, note.batch, note.action, note.time_s)

    def done(self, note: Note) -> None:
        """The device has done this action, and all before it."""
        _NOTE.pack_into(self._memory, _DONE, note.batch, note.action, note.time_s)


@dataclass(frozen=True)
class Journal:
    """What a journal says. `begun`: None where the host has begun nothing. `done`: before the first action is
    done, the last one of the batch before.
    """

    actions: tuple[str, ...]
    batches_per_step: int
    begun: Note | None
    done: Note

    @classmethod
    def read(cls, path: Path) -> Journal | None:
        """Reads a journal; None where there is none, or none that is whole."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if len(data) <= _LABELS:
            return None
        magic, batches_per_step = _HEADER.unpack_from(data)
        if magic != _MAGIC or batches_per_step < 1:
            return None
        begun, done = (Note(*_NOTE.unpack_from(data, offset)) for offset in (_BEGUN, _DONE))
        actions = tuple(data[_LABELS:].decode(errors="replace").split("\n"))
        if not -1 <= done.action < len(actions):
            return None
        return cls(actions, batches_per_step, None if begun.batch == _NOTHING else begun, done)

    @property
    def current(self) -> tuple[int, int] | None:
        """(batch, action) of the first action that is begun and not done; None where all are done."""
        begun, done = self.begun, self.done
        if begun is None or (begun.batch, begun.action) <= (done.batch, done.action):
            return None
        if done.action + 1 < len(self.actions):
            return done.batch, done.action + 1
        return done.batch + 1, 0

    def place(self) -> str | None:
        """'step 3, in the forward pass of slice a/b[0:2]'; None where nothing is under way."""
        if self.current is None:
            return None
        batch, action = self.current
        return f"step {batch // self.batches_per_step + 1}, in {self.actions[action]}"


METRICS_FILE = "metrics.jsonl"
DAMAGED_METRICS_FILE = "metrics-damaged.jsonl"
PREDICTED_FILE = "predicted.json"
PLAN_FILE = "run-plan.yaml"  # the plan that was run; people may keep a plan.yaml there
CHECKPOINTS_DIR = "checkpoints"
MODEL_FILE = "model.safetensors"
SHOWN_LINES = 3


def model_path(run_dir: Path, step: int) -> Path:
    """Where the parameters after `step` steps are saved, keyed by canonical name."""
    return run_dir / CHECKPOINTS_DIR / f"step-{step:06d}" / MODEL_FILE


def has_checkpoints(run_dir: Path) -> bool:
    """Whether a run has saved anything that it may go on from, whole or not."""
    return any((run_dir / CHECKPOINTS_DIR).glob("step-*"))


def newest_model(run_dir: Path) -> Path:
    """The saved parameters of the most steps.

    Raises:
        InputError: the run has saved none.
    """
    models = {
        int(number): path
        for path in (run_dir / CHECKPOINTS_DIR).glob(f"step-*/{MODEL_FILE}")
        if (number := path.parent.name.removeprefix("step-")).isdecimal()
    }
    if not models:
        raise InputError(
            f"{run_dir}: no {CHECKPOINTS_DIR}/step-*/{MODEL_FILE} in it",
            hint="Give the folder of a run that has ended (`spindle launch --run-dir`).",
        )
    return models[max(models)]


def _null_to_nan(value: Any) -> Any:
    return math.nan if value is None else value


def _not_finite_to_null(value: float) -> float | None:
    return value if math.isfinite(value) else None


Loss = Annotated[float, BeforeValidator(_null_to_nan), PlainSerializer(_not_finite_to_null)]

Norm = Annotated[float, PlainSerializer(_not_finite_to_null)]


class StepMetrics(Model):
    """A line of metrics.jsonl, which a run writes for each step. Numbers that are not finite, where training
    went wrong, are null in the file, and NaN here; keys that older lines lack read as null.

    Attributes:
        step: Counted from 1.
        loss: The weighted total of the tasks' losses, over the whole batch.
        task_losses: The tasks' losses before weighting, over the whole batch.
        iteration_s: Seconds by the wall clock.
        samples_per_s: Samples of all tasks together.
        uncounted_tasks: Tasks of which something, a mean's labels or mask, counted nothing in this step, so
            that it was 0 and trained nothing; missing where there are none.
        task_weights: Weights of the tasks' losses in `loss`.
        learning_rates: Learning rate that this step's update took, by optimizer group.
        step_values: Numbers that tasks declare (`Task.step_values`) as this step's forward passes read them,
            by 'task/key'; missing where there are none.
        gradient_norm: Norm of all gradients together, before clipping; null where the train settings do not
            clip.
        loss_scale: What the losses were multiplied by before their backward passes, which `loss` is without;
            missing without `precision: fp16-autocast`.
        skipped: Whether a gradient overflowed, so that the step left parameters and optimizers as they were;
            missing without `precision: fp16-autocast`.
        tokens_per_s: Tokens of all tasks together: the elements of a task's largest field of whole numbers
            that has more than one of them for a sample, padding and ignored labels included; null where no
            task has one.
        peak_share: Share of the devices' published peak (MFU): operations forward that the profile has
            counted, and those backward, over what all devices could do in `iteration_s`; null where no peak
            is known (a CPU), or the plan has no counts. Backward a product of matrices is two; with frozen
            parameters it is one, and none where nothing trains in an operator or before it. What is
            recomputed does not count.
        least_memory_bytes: The least of the ranks' highest memory so far, as of this step's forward passes:
            on a CUDA device what torch has allocated, on a CPU the whole process.
        most_memory_bytes: The most of these.
        data_wait_s: Seconds for which the host of the rank that waited longest for its data did so.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=True)

    step: Annotated[int, Field(ge=1)]
    loss: Loss
    task_losses: dict[str, Loss] = Field(default_factory=dict)
    iteration_s: Annotated[float, Field(ge=0)]
    samples_per_s: Annotated[float, Field(ge=0)] = 0.0
    uncounted_tasks: tuple[str, ...] = ()
    task_weights: dict[str, float] = Field(default_factory=dict)
    learning_rates: dict[str, float] = Field(default_factory=dict)
    step_values: dict[str, float] = Field(default_factory=dict)
    gradient_norm: Norm | None = None
    loss_scale: Annotated[float, Field(ge=0)] | None = None
    skipped: bool | None = None
    tokens_per_s: Annotated[float, Field(ge=0)] | None = None
    peak_share: Annotated[float, Field(ge=0)] | None = None
    least_memory_bytes: Annotated[int, Field(ge=0)] | None = None
    most_memory_bytes: Annotated[int, Field(ge=0)] | None = None
    data_wait_s: Annotated[float, Field(ge=0)] | None = None

    def to_line(self) -> str:
        """One line of JSON with its newline; every finite number reads back as it was."""
        left_out = {name for name in ("uncounted_tasks", "step_values") if not getattr(self, name)}
        if self.loss_scale is None:
            left_out |= {"loss_scale", "skipped"}
        data = self.model_dump(mode="json", exclude=left_out)
        return json.dumps(data, allow_nan=False) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes, *, where: str) -> StepMetrics:
        """The inverse of `to_line`.

        Raises:
            InputError: not JSON in UTF-8, a key missing or wrong, or a number beyond float's range.
        """
        try:
            text = line if isinstance(line, str) else line.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: not a text in UTF-8 ({error.reason})") from error
        return validate(cls, parse_json(text, where=where), where=where)


def forget_metrics_after(run_dir: Path, step: int) -> tuple[str, ...]:
    """Leave out of metrics.jsonl the lines of steps after `step`, which are trained again, an unfinished one,
    and those that cannot be read: a run goes on from its checkpoints, and they need none of these.

    Returns:
        What is wrong with lines that cannot be read, for people; the file as it was is then kept beside it.

    Raises:
        InputError: the file cannot be read or written.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return ()
    kept, problems = [], []
    for number, line in _whole_lines(path):
        try:
            if StepMetrics.from_line(line, where=f"{path}:{number}").step <= step:
                kept.append(line)
        except InputError as error:
            problems.append(error.message)
    before, after = path.read_bytes(), b"".join(kept)
    if problems:
        damaged = path.with_name(DAMAGED_METRICS_FILE)
        with written_whole(damaged) as file:
            file.write(before)
        problems = [*problems[:SHOWN_LINES], *_more(problems), f"left out; as it was it is in {damaged}"]
    if after != before:
        with written_whole(path) as file:
            file.write(after)
    return tuple(problems)


def _more(problems: list[str]) -> list[str]:
    left = len(problems) - SHOWN_LINES
    return [f"and {counted(left, 'line')} more that cannot be read"] if left > 0 else []


def last_step(run_dir: Path) -> int | None:
    """The step of the last whole line of metrics.jsonl; None where there is none.

    Raises:
        InputError: it is not one.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return None
    *_, (number, line) = ((0, b""), *_whole_lines(path))
    return StepMetrics.from_line(line, where=f"{path}:{number}").step if number else None


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """A file's lines that have their end, by number from 1.

    Raises:
        InputError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield number, line
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def read_metrics(run_dir: Path) -> Iterator[StepMetrics]:
    """Every whole line of a run's metrics.jsonl, in file order; none where the file is not there yet.

    Raises:
        InputError: a line that is not one.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return
    for number, line in _whole_lines(path):
        yield StepMetrics.from_line(line, where=f"{path}:{number}")


class Comparison(Model):
    """One time as the plan predicts it and as the run took it.

    Attributes:
        predicted_s: Seconds by the plan.
        measured_s: Seconds as measured, the median over the measured steps.
    """

    predicted_s: Annotated[float, Field(ge=0)]
    measured_s: Annotated[float, Field(ge=0)]

    @property
    def error(self) -> float | None:
        """(measured - predicted) / predicted; None where the prediction is zero."""
        return None if self.predicted_s == 0 else (self.measured_s - self.predicted_s) / self.predicted_s


class MetaOpComparison(Comparison):
    """Forward and backward of all ops of a MetaOp: the sum over its slices of the slowest device of each.

    Attributes:
        metaop: Name of the MetaOp.
        forward: Of the forward passes.
        backward: Of the backward passes.
    """

    metaop: str
    forward: Comparison | None = None
    backward: Comparison | None = None


class PassTimes(Model):
    """Seconds of a forward and a backward pass.

    Attributes:
        forward_s: Of the forward pass.
        backward_s: Of the backward pass.
    """

    forward_s: Annotated[float, Field(ge=0)]
    backward_s: Annotated[float, Field(ge=0)]


class SliceTimes(PassTimes):
    """What a slice, which is of one micro-batch, took: each pass of its slowest device.

    Attributes:
        slice: Index of the slice in the plan.
        shares: Each of the slice's shares in their order, where they are not alike: of unequal size, or on a
            cluster of several types of device. Files of older versions have those of several types alone.
    """

    slice: Annotated[int, Field(ge=0)]
    shares: tuple[PassTimes, ...] = ()


class DeviceTimes(Model):
    """Where one device's measured iteration went (medians over the measured steps). What files of older
    versions lack is absent.

    Attributes:
        device: Number of the device.
        type: Type of device, as the cluster names it.
        compute_s: In slices, forward and backward.
        wait_s: Held up by transfers, gradient sums and losses of other devices.
        data_s: Held up by the input pipeline.
        optimizer_s: In the update.
        other_s: In none of these, as measured step by step.
        predicted_compute_s: What `compute_s` is by the times that the plan was made from, of the device's own
            shares; absent where steps run several sets of tasks.
        least_compute_s: What `compute_s` is over the quarter of the run in which it is least; absent where
            steps run several sets of tasks.
    """

    device: Annotated[int, Field(ge=0)]
    type: str | None = None
    compute_s: Annotated[float, Field(ge=0)]
    wait_s: Annotated[float, Field(ge=0)]
    data_s: Annotated[float, Field(ge=0)]
    optimizer_s: Annotated[float, Field(ge=0)] = 0.0
    other_s: Annotated[float, Field(ge=0)] | None = None
    predicted_compute_s: Annotated[float, Field(ge=0)] | None = None
    least_compute_s: Annotated[float, Field(ge=0)] | None = None

    @property
    def slower(self) -> float | None:
        """By which share of its profile's time it took longer all through the run (0.1: 10 %); None where
        that is not known.
        """
        if not self.predicted_compute_s or self.least_compute_s is None:
            return None
        return self.least_compute_s / self.predicted_compute_s - 1


# From this on a device is named.
SLOW = 0.1


def slow_devices(devices: Sequence[DeviceTimes]) -> tuple[DeviceTimes, ...]:
    """Those that took a tenth longer than their profile says, or more, all through the run."""
    return tuple(device for device in devices if device.slower is not None and device.slower >= SLOW)


class TypeTimes(Comparison):
    """What all devices of a type compute in an iteration, together, by the times that the plan was made from
    and as measured.

    Attributes:
        type: Type of device.
        num_devices: Devices of the type.
    """

    type: str
    num_devices: Annotated[int, Field(ge=1)]

    @property
    def speed(self) -> float | None:
        """The type's speed as a share of that of its profile; None where nothing was measured."""
        return self.predicted_s / self.measured_s if self.measured_s > 0 else None


def data_wait_s(devices: Sequence[DeviceTimes]) -> float:
    """Seconds that the device which waits longest for data waits in an iteration: the others wait for it."""
    return max((times.data_s for times in devices), default=0.0)


class StartUp(Model):
    """Seconds from the command to the end of the first step, and what they went into, as rank 0 saw it.

    Attributes:
        first_step_s: Seconds until the end of the first step.
        stages: Seconds of each stage, in order of time; they add up to `first_step_s`. `checks`: the
            launcher's, of the plan, the workload and the machine, without the command's own start.
            `processes`: worker processes started, libraries imported. `workload`: built without parameters,
            traced, linked, proved; then with this rank's parameters; what the launcher found of the layers is
            handed on, and a run that starts again finds it anew. `connect`: until all workers have met.
            `set-up`: this rank's part on its device, communicators, buckets, optimizer, checkpoint to go on
            from. `first step`: its data and the step itself.
    """

    first_step_s: Annotated[float, Field(ge=0)]
    stages: dict[str, Annotated[float, Field(ge=0)]]


class SetMeasured(Model):
    """What the steps took that ran just these tasks, where steps run several sets of them.

    Attributes:
        tasks: The tasks.
        steps: How many steps each median is over; the first that ran them is left out where there are more.
        iteration: Of an iteration.
        slices: Those of the set's plan.
        devices: Each device in these steps.
    """

    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    steps: Annotated[int, Field(ge=1)]
    iteration: Comparison
    slices: tuple[SliceTimes, ...]
    devices: tuple[DeviceTimes, ...] = ()


class PredictedVsMeasured(Artifact):
    """predicted.json: times as predicted and as measured. What files of older versions lack is absent.

    Attributes:
        steps: How many steps each median is over; the first is left out where there are more.
        iteration: Of an iteration.
        metaops: Of each MetaOp.
        slices: What each slice took, one for each micro-batch; empty where steps run several sets of tasks.
        task_sets: Where steps run several sets of tasks, each set that ran, by its plan.
        devices: Where each device's iteration went.
        types: Of each type of device, in the cluster's order; empty where steps run several sets of tasks.
        start_up: How long the run took to start; absent where the workers were not started by `launch`.
        plan_sha256: Hash of the plan that was run.
    """

    KIND: ClassVar[str] = "predicted"

    schema_: Annotated[Literal["spindle.predicted/1"], Field(alias="schema")] = "spindle.predicted/1"
    steps: Annotated[int, Field(ge=1)]
    iteration: Comparison
    metaops: tuple[MetaOpComparison, ...] = ()
    slices: tuple[SliceTimes, ...] = ()
    task_sets: tuple[SetMeasured, ...] = ()
    devices: tuple[DeviceTimes, ...] = ()
    types: tuple[TypeTimes, ...] = ()
    start_up: StartUp | None = None
    plan_sha256: str | None = None
