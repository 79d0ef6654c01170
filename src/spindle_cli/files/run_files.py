"""What a run leaves in its folder: a line per step; at the end parameters, and predicted against measured.

Rank 0 of the runtime writes them; `launch`, `verify` and `report` read them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact, Model, validate
from spindle_cli.files.writing import write_text

METRICS_FILE = "metrics.jsonl"
PREDICTED_FILE = "predicted.json"
CHECKPOINTS_DIR = "checkpoints"
MODEL_FILE = "model.safetensors"


def model_path(run_dir: Path, step: int) -> Path:
    """Where the parameters after `step` steps are saved, keyed by canonical name."""
    return run_dir / CHECKPOINTS_DIR / f"step-{step:06d}" / MODEL_FILE


def newest_model(run_dir: Path) -> Path:
    """The saved parameters of the most steps.

    Raises:
        InputError: the run has saved none.
    """
    found = sorted((run_dir / CHECKPOINTS_DIR).glob(f"step-*/{MODEL_FILE}"))
    if not found:
        raise InputError(
            f"{run_dir}: no {CHECKPOINTS_DIR}/step-*/{MODEL_FILE} in it",
            hint="Give the folder of a run that has ended (`spindle launch --run-dir`).",
        )
    return found[-1]


def _null_to_nan(value: Any) -> Any:
    return math.nan if value is None else value


def _not_finite_to_null(value: float) -> float | None:
    return value if math.isfinite(value) else None


Loss = Annotated[float, BeforeValidator(_null_to_nan), PlainSerializer(_not_finite_to_null)]


class StepMetrics(Model):
    """A line of metrics.jsonl. `step` counts from 1.

    `loss` is the weighted total and `task_losses` the losses before weighting, both over the whole batch.
    Where training went wrong they are not finite: null in the file, NaN here. `iteration_s`: wall clock.
    `samples_per_s`: of all tasks together. `uncounted_tasks`: those of which something, a mean's labels or
    mask, counted nothing in this step, so that it was 0 and trained nothing; in the file where there are any.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=True)

    step: Annotated[int, Field(ge=1)]
    loss: Loss
    task_losses: dict[str, Loss] = Field(default_factory=dict)
    iteration_s: Annotated[float, Field(ge=0)]
    samples_per_s: Annotated[float, Field(ge=0)] = 0.0
    uncounted_tasks: tuple[str, ...] = ()

    def to_line(self) -> str:
        """One line of JSON with its newline; every finite number reads back as it was."""
        data = self.model_dump(mode="json", exclude=None if self.uncounted_tasks else {"uncounted_tasks"})
        return json.dumps(data, allow_nan=False) + "\n"

    @classmethod
    def from_line(cls, line: str, *, where: str) -> StepMetrics:
        """The inverse of `to_line`.

        Raises:
            InputError: not JSON, or a key missing or wrong.
        """
        try:
            data: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{where}: not a line of JSON: {error.msg}") from error
        return validate(cls, data, where=where)


def forget_metrics_after(run_dir: Path, step: int) -> None:
    """Leave out of metrics.jsonl the lines of steps after `step`, which are trained again, and an unfinished
    one.

    Raises:
        InputError: a line that is not one; the file cannot be written.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    kept = "".join(line for line in whole if StepMetrics.from_line(line, where=str(path)).step <= step)
    if kept != text:
        write_text(path, kept)


def read_metrics(run_dir: Path) -> Iterator[StepMetrics]:
    """Every whole line of a run's metrics.jsonl, in file order; none where the file is not there yet.

    Raises:
        InputError: a line that is not one.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith("\n"):
                yield StepMetrics.from_line(line, where=f"{path}:{number}")


class Comparison(Model):
    """One time as the plan predicts it and as the run took it (median over the measured steps)."""

    predicted_s: Annotated[float, Field(ge=0)]
    measured_s: Annotated[float, Field(ge=0)]

    @property
    def error(self) -> float | None:
        """(measured - predicted) / predicted; None where the prediction is zero."""
        return None if self.predicted_s == 0 else (self.measured_s - self.predicted_s) / self.predicted_s


class MetaOpComparison(Comparison):
    """Forward and backward of all ops of a MetaOp: the sum over its slices of the slowest device of each."""

    metaop: str
    forward: Comparison | None = None
    backward: Comparison | None = None


class DeviceTimes(Model):
    """Where one device's measured iteration went (medians over the measured steps).

    `compute_s`: in slices, forward and backward. `wait_s`: held up by transfers, gradient sums and losses of
    other devices. `data_s`: held up by the input pipeline. `optimizer_s`: in the update. `other_s`: in none
    of these, as measured step by step; None in files of older versions.
    """

    device: Annotated[int, Field(ge=0)]
    compute_s: Annotated[float, Field(ge=0)]
    wait_s: Annotated[float, Field(ge=0)]
    data_s: Annotated[float, Field(ge=0)]
    optimizer_s: Annotated[float, Field(ge=0)] = 0.0
    other_s: Annotated[float, Field(ge=0)] | None = None


class StartUp(Model):
    """Seconds from the command to the end of the first step, and what they went into, as rank 0 saw it.

    `stages`: in order of time; they add up to `first_step_s`. The names:
        checks: the launcher's, of the plan, the workload and the machine.
        processes: until the worker's code runs: processes started, libraries imported.
        connect: until all workers have met.
        workload: built without parameters, traced, linked, proved; then this rank's part of it built.
        set-up: communicators, buckets, optimizer, checkpoint to go on from.
        first step: its data and the step itself.
    """

    first_step_s: Annotated[float, Field(ge=0)]
    stages: dict[str, Annotated[float, Field(ge=0)]]


class PredictedVsMeasured(Artifact):
    """predicted.json. `steps`: how many each median is over; the first is left out where there are more.

    `start_up`: None in files of older versions, and where the workers were not started by `launch`.
    """

    KIND: ClassVar[str] = "predicted"

    schema_: Annotated[Literal["spindle.predicted/1"], Field(alias="schema")] = "spindle.predicted/1"
    steps: Annotated[int, Field(ge=1)]
    iteration: Comparison
    metaops: tuple[MetaOpComparison, ...] = ()
    devices: tuple[DeviceTimes, ...] = ()
    start_up: StartUp | None = None
