"""What `spindle calibrate` reports."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.profile.types import CalibratedRun

_Seconds = Annotated[float, Field(ge=0)]


class CalibratedPoint(Model):
    """A point of a curve, or a share, that ran: seconds of one op forward and backward as the profile had
    them, and as measured without what devices do beside their slices. `steps`: of the runs.

    `samples`: of the share. `dp`: into how many such shares the batch would be cut, which counts those of all
    micro-batches; None where that is no whole number, of shares that are not equal. `device`: its type, where
    the profile has several.
    """

    metaop: str
    dp: int | None
    tp: int
    samples: float
    device: str | None = None
    steps: int
    forward_s: _Seconds
    backward_s: _Seconds
    measured_forward_s: _Seconds
    measured_backward_s: _Seconds


class CalibratedLink(Model):
    """Messages, or sums and gathers, that were seen over a kind of link, in the last steps of the runs:
    seconds of all together as the plan's links predict them, and as measured.
    """

    link: Literal["intra_node", "inter_node"]
    what: Literal["messages", "sums"]
    count: Annotated[int, Field(ge=1)]
    predicted_s: _Seconds
    measured_s: _Seconds


class IterationPrediction(Model):
    """An iteration: by its plan, by the profile before, by the one made now, and as measured.

    `other_s`: of its slowest device, what it did outside of all that is timed; no profile predicts it.
    """

    plan_s: _Seconds
    before_s: _Seconds
    after_s: _Seconds
    measured_s: _Seconds
    other_s: _Seconds


class SetPrediction(IterationPrediction):
    """That of the steps that ran just these tasks. `share`: of the steps by the plan, among those that ran
    any set; `steps`: that were measured.
    """

    tasks: tuple[str, ...]
    share: Annotated[float, Field(ge=0, le=1)]
    steps: int


class RunPrediction(IterationPrediction):
    """A run's. `task_sets`: where its steps ran several sets of tasks, that of each, of which the run's is
    the mean by their shares.
    """

    run: str
    task_sets: tuple[SetPrediction, ...] = ()


class CalibrationReport(Artifact):
    """The document of `spindle calibrate --json`.

    Attributes:
        profile: that was written. `cluster`: likewise, where one was asked for.
        scaled_points: points of curves that did not run and were scaled; `points_left`: that are as they
            were.
        optimizer_s_per_byte, measured_optimizer_s_per_byte: before, and after; None: no run has measured it.
        processor_times: by what the processor's costs were multiplied.
        link_times: by kind of link, by what messages were, where any were seen.
        warnings: what makes the figures uncertain.
    """

    KIND: ClassVar[str] = "calibration"

    schema_: Annotated[Literal["spindle.calibration/1"], Field(alias="schema")] = "spindle.calibration/1"
    profile: str
    cluster: str | None = None
    runs: tuple[CalibratedRun, ...]
    iterations: tuple[RunPrediction, ...]
    points: tuple[CalibratedPoint, ...]
    scaled_points: int
    points_left: int
    links: tuple[CalibratedLink, ...]
    link_times: dict[str, float]
    optimizer_s_per_byte: float
    measured_optimizer_s_per_byte: float | None
    processor_times: float
    warnings: tuple[str, ...] = ()
