"""What `spindle calibrate` reports."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.profile.types import CalibratedRun

_Seconds = Annotated[float, Field(ge=0)]


class CalibratedPoint(Model):
    """A point of a curve, or a share, that ran: seconds of one op as the profile had them, and as measured
    without what devices do beside their slices.

    Attributes:
        metaop: Name of the MetaOp.
        dp: Into how many such shares the batch would be cut, which counts those of all micro-batches; null
            where that is no whole number.
        tp: Devices that hold a share together.
        samples: Samples of the share.
        device: Its type, where the profile has several.
        steps: Steps of the runs.
        forward_s: Forward, as the profile had it.
        backward_s: Backward, as the profile had it.
        measured_forward_s: Forward, as measured.
        measured_backward_s: Backward, as measured.
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
    """Messages, or sums and gathers, that were seen over a kind of link, in the last steps of the runs.

    Attributes:
        link: The kind of link.
        what: What went over it.
        count: How many were seen.
        predicted_s: Seconds of all together as the plan's links predict them.
        measured_s: Seconds of all together as measured.
    """

    link: Literal["intra_node", "inter_node"]
    what: Literal["messages", "sums"]
    count: Annotated[int, Field(ge=1)]
    predicted_s: _Seconds
    measured_s: _Seconds


class IterationPrediction(Model):
    """Seconds of an iteration.

    Attributes:
        plan_s: By its plan.
        before_s: For the plan's slices, by the profile before.
        after_s: For the plan's slices, by the profile made now.
        measured_s: As measured.
        other_s: What its slowest device did outside of all that is timed; no profile predicts it.
    """

    plan_s: _Seconds
    before_s: _Seconds
    after_s: _Seconds
    measured_s: _Seconds
    other_s: _Seconds


class SetPrediction(IterationPrediction):
    """An iteration of the steps that ran just these tasks.

    Attributes:
        tasks: The tasks.
        share: Their share of the steps by the plan, among those that ran any set.
        steps: Steps that were measured.
    """

    tasks: tuple[str, ...]
    share: Annotated[float, Field(ge=0, le=1)]
    steps: int


class RunPrediction(IterationPrediction):
    """An iteration of a run.

    Attributes:
        run: The run's folder.
        task_sets: Where its steps ran several sets of tasks, the iteration of each, of which the run's is the
            mean by their shares.
    """

    run: str
    task_sets: tuple[SetPrediction, ...] = ()


class CalibrationReport(Artifact):
    """The document of `spindle calibrate --json`.

    Attributes:
        profile: The profile that was written.
        cluster: The cluster file that was written, where one was asked for.
        runs: The runs that it was calibrated by.
        iterations: An iteration of each run, by its plan, by profiles and as measured.
        points: What ran.
        scaled_points: Points of curves that did not run and were scaled.
        points_left: Points of curves that are as they were.
        links: What was seen of links.
        link_times: By what messages were multiplied, by kind of link, where any were seen.
        optimizer_s_per_byte: Before.
        measured_optimizer_s_per_byte: After; null: no run has measured it.
        processor_times: By what the processor's costs were multiplied.
        warnings: What makes the figures uncertain.
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
