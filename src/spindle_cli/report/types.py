"""What a report says, as data: one document, embedded in the page and printed by `spindle report --json`.

Indices refer to `ReportData.metaops` and `ReportData.slices`. Runs of devices are [first, last] numbers,
both included.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.files.artifact import Artifact, Model, Sparse
from spindle_cli.plan.types import Predicted
from spindle_cli.profile.types import CurvePoint, Fit

DeviceRun = tuple[int, int]


class ClusterView(Model):
    """The cluster. `node_starts`: the first device of each node; `memory_bytes`: of the smallest device."""

    name: str
    device: str
    num_devices: int
    node_starts: tuple[int, ...]
    memory_bytes: int


class MetaOpView(Model):
    """A MetaOp and its curve.

    `short`: its name without the task. `curve`: of the profile, or only the points that the plan uses.
    `device_s`: seconds of its slices times their devices.
    """

    name: str
    short: str
    task: str
    component: str
    num_ops: int
    batch_size: int
    inputs: tuple[int, ...]
    curve: tuple[CurvePoint, ...]
    fit: Fit | None
    device_s: float


class SliceView(Model):
    """A slice as planned.

    `backward_s`: start and end of its backward pass, where the plan tells passes apart; `start_s` and `end_s`
    are then of the forward pass. `part`: ' 2/4', which of how many micro-batches it is of.

    `rows`: offsets of its shares into the batch, or micro-batch, where they are not equal.

    `task_row`, `component_row`: where it is drawn when the rows are tasks or components: as many rows as
    it has devices, from this one on.
    """

    metaop: int
    ops: tuple[int, int]
    wave: int
    runs: tuple[DeviceRun, ...]
    num_devices: int
    dp: int
    tp: int
    rows: tuple[int, ...] | None = None
    part: str = ""
    recompute: bool
    selective: bool = False
    offload: tuple[tuple[int, int], ...] = ()
    start_s: float
    end_s: float
    backward_s: tuple[float, float] | None = None
    task_row: int
    component_row: int


class Band(Model):
    """The rows of one task or component: `num_rows` of them, from `first_row` on."""

    name: str
    first_row: int
    num_rows: int


class Happening(Sparse):
    """What devices do at the same time in the simulated iteration, or what one does in a measured one.

    Attributes:
        kind: forward and backward are computes of `slice`. A transfer carries an activation to `slice` from
            `source_slice`, or a gradient back the same way. A wait is before `slice`, or before the optimizer
            step where that is None. The optimizer updates all parameters of its devices. Measured alone: a
            gather of a parameter group's new values; data, a wait for the input pipeline.
        runs: the devices; of a transfer, senders and receivers.
        cause: what a wait is for.
        is_gradient: a transfer on the way back.
        num_bytes: of all transfers or sums in it together.
        count: how many transfers.
    """

    kind: Literal["forward", "backward", "transfer", "sum", "wait", "optimizer", "gather", "data"]
    start_s: float
    end_s: float
    runs: tuple[DeviceRun, ...]
    slice: int | None = None
    source_slice: int | None = None
    cause: (
        Literal["activation", "gradient", "partner", "sum", "leaving", "gather", "losses", "norm", "islands"]
        | None
    ) = None
    is_gradient: bool = False
    num_bytes: int = 0
    count: int = 1


class DeviceUse(Model):
    """What each device of a run does in the simulated iteration; the three make up the whole of it."""

    run: DeviceRun
    compute_s: float
    waiting_s: float
    done_early_s: float


class WaitTotal(Model):
    """Device-seconds that a MetaOp's slices wait for another's; None: the optimizer step, gradient sums.

    `moving_share`: of them, the share in which what they wait for was on its way.
    """

    waiter: str | None
    source: str | None
    cause: Literal["activation", "gradient", "partner", "sum", "leaving", "gather"]
    device_s: float
    moving_share: float


class Timeline(Model):
    """One simulated step, `iteration_s` long, of so many `batches`.

    `use` covers every device; `waits` are the largest, most first.
    """

    iteration_s: float
    batches: int = 1
    mean_use: float
    transferred_bytes: int
    happenings: tuple[Happening, ...]
    use: tuple[DeviceUse, ...]
    waits: tuple[WaitTotal, ...]


class HeldRange(Model):
    """The least and the most that each device of a run holds in the simulated step."""

    run: DeviceRun
    least_bytes: int
    most_bytes: int


class ClusterWork(Model):
    """What all devices of a plan together compute over its simulated step, and what each holds.

    Attributes:
        is_this: the plan of the report.
        step_s: seconds of the step, of all its batches.
        flops_per_s: [seconds, floating-point operations per second from then on], ascending; forward and
            backward, nothing counted that is done again. None where the profile has not counted them.
        mean_flops_per_s: over the step; `peak_share`: as a share of all devices' published peak, None where
            that is not known.
        memory: covers every device.
    """

    strategy: str
    is_this: bool
    step_s: float
    flops_per_s: tuple[tuple[float, int], ...] | None
    mean_flops_per_s: float | None
    peak_share: float | None
    memory: tuple[HeldRange, ...]


class MemoryUse(Model):
    """Predicted peak bytes of each device of a run, by what takes them, and what it has."""

    run: DeviceRun
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    buffer_bytes: int
    allocator_bytes: int
    outside_bytes: int
    capacity_bytes: int


class StrategyView(Model):
    """A strategy's plan for the same profile and cluster, or why it has none.

    `is_this`: the plan of the report.
    """

    strategy: str
    is_this: bool
    predicted: Predicted | None
    failure: str | None = None


class StepPoint(Sparse):
    """Means over consecutive steps, `step` the last of them; what is not known is left out.

    Attributes:
        loss, task_losses: None where one of the steps' is not finite.
        loss_range, task_loss_ranges, iteration_range_s: the least and the most of the steps; of losses, of
            those that are finite. Left out where there is one step.
        flops_per_s: floating-point operations of a device in the mean, forward and backward, from what the
            profile has counted (costs/work.py).
        peak_share: the same as a share of the devices' published peak.
        least_memory_bytes, most_memory_bytes: of all ranks and steps.
        data_wait_s: for which the rank that waited longest for its data did so; `data_wait_most_s`: of the
            step in which that was most.
    """

    step: int
    loss: float | None
    loss_range: tuple[float, float] | None = None
    task_losses: dict[str, float | None]
    task_loss_ranges: dict[str, tuple[float, float]] | None = None
    iteration_s: float
    iteration_range_s: tuple[float, float] | None = None
    flops_per_s: float | None = None
    peak_share: float | None = None
    least_memory_bytes: int | None = None
    most_memory_bytes: int | None = None
    data_wait_s: float | None = None
    data_wait_most_s: float | None = None


class EvaluationPoint(Model):
    """A task evaluated after `step` steps. What is not finite is None."""

    step: int
    task: str
    num_samples: int
    loss: float | None
    metrics: dict[str, float | None]
    seconds: float


class Attempt(Model):
    """The workers were started, at `time_s` (since the epoch), to go on after `step` steps.

    `cause`: why the attempt before failed; None where there was none, or the launch before had ended.
    """

    time_s: float
    step: int
    cause: str | None


class TimePair(Model):
    """A predicted and a measured time."""

    name: str
    predicted_s: float
    measured_s: float


class SetPair(TimePair):
    """Predicted and measured times of the steps that ran just these tasks, where steps run several sets of
    them.

    `steps`: how many the times are the median of.
    """

    tasks: tuple[str, ...]
    steps: int


class MeasuredDevice(Model):
    """Where one device's measured iteration went: seconds of the median step."""

    device: int
    compute_s: float
    wait_s: float
    data_s: float
    optimizer_s: float = 0.0


class MeasuredIteration(Model):
    """One step of a run (counted from 1) as it was measured.

    `clock_error_s`: no two devices' times are further apart than twice this for the clocks' sake.
    """

    step: int
    iteration_s: float
    clock_error_s: float
    happenings: tuple[Happening, ...]


class RunView(Model):
    """A run by this plan.

    Attributes:
        last_step: that it has done; None before the first.
        steps_per_point: steps behind each of `points`.
        tasks: of all points.
        predicted_s: of a step, as the plan predicts it; None where the plan is not known.
        iteration: where steps run several sets of tasks, means over the steps.
        task_sets: of the sets that ran, in the order in which they first did; empty where every step runs all
            tasks.
        evaluations: in order of steps.
        attempts: each start of its workers; empty for runs of older versions.
    """

    folder: str
    num_steps: int
    last_step: int | None = None
    tasks: tuple[str, ...] = ()
    predicted_s: float | None = None
    steps_per_point: int
    points: tuple[StepPoint, ...]
    measured_steps: int | None  # how many the medians below are over; None where the run has not ended
    iteration: TimePair | None
    task_sets: tuple[SetPair, ...] = ()
    metaops: tuple[TimePair, ...]
    devices: tuple[MeasuredDevice, ...]
    timeline: MeasuredIteration | None = None  # None where the run has left none
    evaluations: tuple[EvaluationPoint, ...] = ()
    attempts: tuple[Attempt, ...] = ()


class ReportData(Artifact):
    """The document of `spindle report --json`.

    Attributes:
        gap: how far `compute_s` is above the lower bound, as a share of it; None if the bound is zero.
        violations: what `spindle check` says against the plan; with any, there is no timeline.
        has_profile: the curves are the whole profile's.
        task_bands, component_bands: the rows when they are tasks or components.
        strategies: None without the profile.
        work: of this plan, and of that of `sequential` if it is another and there is the profile; empty for a
            plan that breaks rules.
    """

    KIND: ClassVar[str] = "report"

    schema_: Annotated[Literal["spindle.report/1"], Field(alias="schema")] = "spindle.report/1"
    workload: str
    strategy: str
    plan_sha256: str
    cluster: ClusterView
    predicted: Predicted
    gap: float | None
    num_waves: int
    notes: tuple[str, ...]
    violations: tuple[str, ...]
    has_profile: bool
    metaops: tuple[MetaOpView, ...]
    slices: tuple[SliceView, ...]
    task_bands: tuple[Band, ...]
    component_bands: tuple[Band, ...]
    memory: tuple[MemoryUse, ...]
    timeline: Timeline | None
    strategies: tuple[StrategyView, ...] | None
    work: tuple[ClusterWork, ...] = ()
    run: RunView | None
