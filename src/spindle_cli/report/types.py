"""What a report says, as data: one document, embedded in the page and printed by `spindle report --json`.

Indices refer to `ReportData.metaops` and `ReportData.slices`. Runs of devices are [first, last] numbers,
both included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field

from spindle_cli.files.artifact import Artifact, Model, Sparse
from spindle_cli.plan.types import Predicted
from spindle_cli.profile.types import CurvePoint, Fit

DeviceRun = tuple[int, int]
T = TypeVar("T")


def runs_of(devices: Iterable[int]) -> tuple[DeviceRun, ...]:
    """Ascending runs [first, last] of consecutive numbers: {5, 0, 1, 2} -> ((0, 2), (5, 5))."""
    runs: list[DeviceRun] = []
    for device in sorted(set(devices)):
        if runs and runs[-1][1] == device - 1:
            runs[-1] = (runs[-1][0], device)
        else:
            runs.append((device, device))
    return tuple(runs)


def equal_runs(values: Sequence[T]) -> tuple[tuple[DeviceRun, T], ...]:
    """Runs of devices with equal values, of one value per device."""
    runs: list[tuple[DeviceRun, T]] = []
    for value, members in groupby(enumerate(values), key=lambda item: item[1]):
        devices = [device for device, _ in members]
        runs.append(((devices[0], devices[-1]), value))
    return tuple(runs)


class ClusterView(Model):
    """The cluster.

    Attributes:
        name: Its name.
        device: The type of its devices.
        num_devices: How many there are.
        node_starts: The first device of each node.
        memory_bytes: Bytes of the smallest device.
    """

    name: str
    device: str
    num_devices: int
    node_starts: tuple[int, ...]
    memory_bytes: int


class MetaOpView(Model):
    """A MetaOp and its curve.

    Attributes:
        name: Its name.
        short: Its name without the task.
        task: Its task.
        component: Key of its parameters, or its own name.
        num_ops: How many ops it has.
        batch_size: Samples of a batch.
        inputs: The MetaOps that it takes from.
        curve: Points of the profile, or only those that the plan uses.
        fit: The fit through them; null: there is none.
        device_s: Seconds of its slices times their devices.
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

    Attributes:
        metaop: Its MetaOp.
        ops: The first op, and the one behind the last.
        wave: Its wave.
        runs: Its devices.
        num_devices: How many these are.
        dp: Shares of the batch.
        tp: Devices that hold each.
        rows: Offsets of its shares into the batch, or micro-batch, where they are not equal.
        part: ' 2/4': which of how many micro-batches it is of.
        recompute: Whether activations are recomputed.
        selective: Whether what takes longest is kept nevertheless.
        offload: Ranges of ops whose activations are in host memory.
        start_s: When it starts; its forward pass, where there is `backward_s`.
        end_s: When it ends.
        backward_s: Start and end of its backward pass, where the plan tells passes apart.
        task_row: Where it is drawn when rows are tasks: as many rows as it has devices, from this one on.
        component_row: The same when rows are components.
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
    """The rows of one task or component.

    Attributes:
        name: Its name.
        first_row: The first row.
        num_rows: How many rows.
    """

    name: str
    first_row: int
    num_rows: int


class Happening(Sparse):
    """What devices do at the same time in the simulated iteration, or what one does in a measured one.

    Attributes:
        kind: Forward and backward are computes of `slice`. A transfer carries an activation to `slice` from
            `source_slice`, or a gradient back the same way. A wait is before `slice`, or before the optimizer
            step where that is None. The optimizer updates all parameters of its devices. Measured alone: a
            gather of a parameter group's new values; data, a wait for the input pipeline.
        start_s: When it starts.
        end_s: When it ends.
        runs: The devices; of a transfer, senders and receivers.
        slice: The slice that it is of.
        source_slice: Where a transfer comes from.
        cause: What a wait is for.
        is_gradient: A transfer on the way back.
        num_bytes: Of all transfers or sums in it together.
        count: How many transfers.
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
    """What each device of a run does in the simulated iteration; the three times make up the whole of it.

    Attributes:
        run: The devices.
        compute_s: Seconds that it computes.
        waiting_s: Seconds that it waits.
        done_early_s: Seconds behind its last action.
    """

    run: DeviceRun
    compute_s: float
    waiting_s: float
    done_early_s: float


class WaitTotal(Model):
    """Device-seconds that a MetaOp's slices wait for another's.

    Attributes:
        waiter: The MetaOp that waits; null: the optimizer step.
        source: What it waits for; null: gradient sums.
        cause: What a wait is for.
        device_s: How many device-seconds.
        moving_share: The share of them in which what they wait for was on its way.
    """

    waiter: str | None
    source: str | None
    cause: Literal["activation", "gradient", "partner", "sum", "leaving", "gather"]
    device_s: float
    moving_share: float


class Timeline(Model):
    """One simulated step.

    Attributes:
        iteration_s: How long it is.
        batches: Batches in it.
        mean_use: Share of it in which devices compute.
        transferred_bytes: Bytes that devices send in it.
        happenings: What happens in it.
        use: What each device does; covers every device.
        waits: The largest waits, most first.
    """

    iteration_s: float
    batches: int = 1
    mean_use: float
    transferred_bytes: int
    happenings: tuple[Happening, ...]
    use: tuple[DeviceUse, ...]
    waits: tuple[WaitTotal, ...]


class HeldRange(Model):
    """The least and the most that each device of a run holds in the simulated step.

    Attributes:
        run: The devices.
        least_bytes: The least.
        most_bytes: The most.
    """

    run: DeviceRun
    least_bytes: int
    most_bytes: int


class ClusterWork(Model):
    """What all devices of a plan together compute over its simulated step, and what each holds.

    Attributes:
        strategy: Which strategy made the plan.
        is_this: The plan of the report.
        step_s: Seconds of the step, of all its batches.
        flops_per_s: [seconds, floating-point operations per second from then on], ascending; forward and
            backward, nothing counted that is done again. None where the profile has not counted them.
        mean_flops_per_s: Mean over the step.
        peak_share: The mean as a share of all devices' published peak; null: that is not known.
        memory: Covers every device.
    """

    strategy: str
    is_this: bool
    step_s: float
    flops_per_s: tuple[tuple[float, int], ...] | None
    mean_flops_per_s: float | None
    peak_share: float | None
    memory: tuple[HeldRange, ...]


class MemoryUse(Model):
    """Predicted peak bytes of each device of a run, by what takes them, and what it has.

    Attributes:
        run: The devices.
        parameter_bytes: Of parameters.
        gradient_bytes: Of gradients.
        optimizer_bytes: Of optimizer state.
        activation_bytes: Of activations.
        buffer_bytes: Of buffers.
        allocator_bytes: What torch's allocator holds beyond the tensors.
        outside_bytes: What is outside of it: the reserve, and communicators.
        capacity_bytes: What a device has.
    """

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

    Attributes:
        strategy: The strategy.
        is_this: Whether it is the plan of the report.
        predicted: What is predicted; null: there is no plan.
        failure: Why there is none.
    """

    strategy: str
    is_this: bool
    predicted: Predicted | None
    failure: str | None = None


class StepPoint(Sparse):
    """Means over consecutive steps, `step` the last of them; what is not known is left out.

    Attributes:
        step: The last of the steps.
        loss: None where one of the steps' is not finite.
        loss_range: The least and the most of the steps; of losses, of those that are finite. Left out where
            there is one step.
        task_losses: None where one of the steps' is not finite.
        task_loss_ranges: The least and the most of the steps; of losses, of those that are finite. Left out
            where there is one step.
        iteration_s: Mean seconds of an iteration.
        iteration_range_s: The least and the most of the steps; of losses, of those that are finite. Left out
            where there is one step.
        flops_per_s: Floating-point operations of a device in the mean, forward and backward, from what the
            profile has counted (costs/flops.py).
        peak_share: `flops_per_s` as a share of the devices' published peak.
        least_memory_bytes: Of all ranks and steps.
        most_memory_bytes: Of all ranks and steps.
        data_wait_s: Seconds for which the rank that waited longest for its data did so.
        data_wait_most_s: The same of the step in which that was most.
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
    """A task evaluated. What is not finite is null.

    Attributes:
        step: After how many steps.
        task: The task.
        num_samples: On how many samples.
        loss: Its loss.
        metrics: Its metrics, by name.
        seconds: How long it took.
    """

    step: int
    task: str
    num_samples: int
    loss: float | None
    metrics: dict[str, float | None]
    seconds: float


class Attempt(Model):
    """A start of the workers.

    Attributes:
        time_s: When, in seconds since the epoch.
        step: After how many steps they went on.
        cause: Why the attempt before failed; null: there was none, or the launch before had ended.
    """

    time_s: float
    step: int
    cause: str | None


class TimePair(Model):
    """A predicted and a measured time.

    Attributes:
        name: What it is of.
        predicted_s: Predicted seconds.
        measured_s: Measured seconds.
    """

    name: str
    predicted_s: float
    measured_s: float


class SetPair(TimePair):
    """Predicted and measured times of the steps that ran just these tasks, where steps run several sets of
    them.

    Attributes:
        tasks: The tasks.
        steps: How many steps the times are the median of.
    """

    tasks: tuple[str, ...]
    steps: int


class MeasuredDevice(Model):
    """Where one device's measured iteration went: seconds of the median step.

    Attributes:
        device: Its number.
        compute_s: Seconds that it computed.
        wait_s: Seconds that it waited for others.
        data_s: Seconds that it waited for data.
        optimizer_s: Seconds of the optimizer's step.
    """

    device: int
    compute_s: float
    wait_s: float
    data_s: float
    optimizer_s: float = 0.0


class MeasuredIteration(Model):
    """One step of a run as it was measured.

    Attributes:
        step: Which step, counted from 1.
        iteration_s: How long it was.
        clock_error_s: No two devices' times are further apart than twice this for the clocks' sake.
        happenings: What devices did in it.
    """

    step: int
    iteration_s: float
    clock_error_s: float
    happenings: tuple[Happening, ...]


class RunView(Model):
    """A run by this plan.

    Attributes:
        folder: The run's folder.
        num_steps: Steps that are known.
        last_step: That it has done; None before the first.
        tasks: Of all points.
        predicted_s: Of a step, as the plan predicts it; None where the plan is not known.
        steps_per_point: Steps behind each of `points`.
        points: Means over consecutive steps.
        measured_steps: How many steps the medians below are over; null: the run has not ended.
        iteration: Where steps run several sets of tasks, means over the steps.
        task_sets: Of the sets that ran, in the order in which they first did; empty where every step runs all
            tasks.
        metaops: Predicted and measured times of each MetaOp.
        devices: Where the time of each device went.
        timeline: A step as it was measured; null: the run has left none.
        evaluations: In order of steps.
        attempts: Each start of its workers; empty for runs of older versions.
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
        workload: The workload's name.
        strategy: Which strategy made the plan.
        plan_sha256: Of the plan.
        cluster: The cluster.
        predicted: What the plan predicts.
        gap: How far `compute_s` is above the lower bound, as a share of it; None if the bound is zero.
        num_waves: Waves of the plan.
        notes: What the planner has to say.
        violations: What `spindle check` says against the plan; with any, there is no timeline.
        has_profile: The curves are the whole profile's.
        metaops: The MetaOps.
        slices: The slices.
        task_bands: The rows when they are tasks or components.
        component_bands: The rows when they are tasks or components.
        memory: Predicted memory, by runs of devices.
        timeline: The simulated step; null: the plan breaks rules.
        strategies: None without the profile.
        work: Of this plan, and of that of `sequential` if it is another and there is the profile; empty for a
            plan that breaks rules.
        run: The run that was given; null: none.
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
