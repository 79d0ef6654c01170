"""What `spindle simulate` says, as a document and as tables for people: the iteration, each device's use and
memory, and where time is spent waiting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from rich import box
from rich.table import Table

from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.simulate.types import Activity, Cause, OptimizerStep, Simulation, Span, Wait
from spindle_cli.units import counted, format_bytes, format_seconds

MAX_DEVICES = 16
MAX_WAITS = 10


class DeviceUse(Model):
    """One device's step: `compute_s` + `waiting_s` + `done_early_s` make up the whole of it.

    Attributes:
        device: Number of the device.
        compute_s: Seconds in which it computes, the optimizer's step included.
        optimizer_s: Seconds of the optimizer's step.
        waiting_s: Seconds in which it has nothing to compute, until its last action.
        done_early_s: Seconds behind its last action.
        utilisation: Share of the step in which it computes.
        peak_memory_bytes: The most bytes that it holds.
        memory: Seconds, and bytes held from then on, ascending.
    """

    device: int
    compute_s: float
    optimizer_s: float
    waiting_s: float
    done_early_s: float
    utilisation: float
    peak_memory_bytes: int
    memory: tuple[tuple[float, int], ...]


class SliceTimes(Model):
    """When a slice runs in the step's first batch: from its first device's start to its last device's end.

    Attributes:
        metaop: Name of the MetaOp.
        ops: Its ops, [first, last).
        num_devices: Devices that it runs on.
        micro_batch: Which of how many micro-batches it is of, '2/4'; empty where its task has one.
        forward_start_s: Start of the forward pass.
        forward_end_s: End of the forward pass.
        backward_start_s: Start of the backward pass.
        backward_end_s: End of the backward pass.
    """

    metaop: str
    ops: tuple[int, int]
    num_devices: int
    micro_batch: str = ""  # which of how many it is of, '2/4'; empty where its task has one
    forward_start_s: float
    forward_end_s: float
    backward_start_s: float
    backward_end_s: float


class Waiting(Model):
    """All waits of one MetaOp's slices for one thing, over all devices.

    Attributes:
        metaop: The MetaOp that waits; null for the optimizer step.
        cause: What it waits for.
        source: The MetaOp that this comes from; null for gradient sums and gathers.
        num_waits: How many waits.
        device_s: Their seconds, over all devices together.
        moving_device_s: What of these it took on the links; the rest is waiting for the source to be ready.
        longest_s: The longest single wait.
        longest_device: The device that has it.
        longest_source: The device that it waits for.
    """

    metaop: str | None
    cause: Cause
    source: str | None
    num_waits: int
    device_s: float
    moving_device_s: float
    longest_s: float
    longest_device: int
    longest_source: int


class SimulationReport(Artifact):
    """The document of `spindle simulate --json`. With islands that average only now and then all of it is of
    one, without the outer step, which is not simulated.

    Attributes:
        plan: The plan.
        strategy: Its strategy.
        num_devices: Devices of the plan.
        iteration_s: Seconds of one batch, on average; all else is of the whole step.
        planned_iteration_s: The same as the plan predicts it.
        accumulate: Batches of a step.
        step_s: Seconds of the step.
        islands: How many islands there are.
        outer_step_s: Seconds of an outer step, as the plan says.
        outer_every: Steps from one outer step to the next.
        mean_iteration_s: iteration_s with an iteration's part of an outer step.
        mean_utilisation: Mean over the devices of the share of the step in which they compute.
        transferred_bytes: Bytes of all messages.
        summed_bytes: Bytes of all collectives.
        devices: Each device, by number.
        slices: Each slice, as in the plan.
        waits: Waits, by their seconds, most first.
    """

    KIND: ClassVar[str] = "simulation"

    schema_: Annotated[Literal["spindle.simulation/1"], Field(alias="schema")] = "spindle.simulation/1"
    plan: str
    strategy: str
    num_devices: int
    iteration_s: float
    planned_iteration_s: float
    accumulate: int = 1
    step_s: float
    islands: int = 1
    outer_step_s: float = 0.0
    outer_every: int | None = None
    mean_iteration_s: float
    mean_utilisation: float
    transferred_bytes: int
    summed_bytes: int
    devices: tuple[DeviceUse, ...]
    slices: tuple[SliceTimes, ...]
    waits: tuple[Waiting, ...]


def report_of(path: str, simulation: Simulation) -> SimulationReport:
    """The report on a plan read from `path`."""
    plan = simulation.plan
    return SimulationReport(
        plan=path,
        strategy=plan.strategy,
        num_devices=plan.cluster.num_devices,
        iteration_s=simulation.iteration_s,
        planned_iteration_s=plan.predicted.iteration_s,
        accumulate=plan.accumulate,
        step_s=simulation.step_s,
        islands=1 if plan.local_sgd is None else plan.local_sgd.islands,
        outer_step_s=0.0 if plan.islands is None else plan.islands.outer_step_s,
        outer_every=None if plan.local_sgd is None else plan.local_sgd.every,
        mean_iteration_s=simulation.iteration_s + plan.outer_share_s,
        mean_utilisation=sum(simulation.utilisation) / len(simulation.utilisation),
        transferred_bytes=sum(passage.num_bytes for passage in simulation.passages),
        summed_bytes=sum(done.num_bytes for done in simulation.sums),
        devices=_devices(simulation),
        slices=_slices(simulation),
        waits=_waits(simulation),
    )


def _devices(simulation: Simulation) -> tuple[DeviceUse, ...]:
    waiting_s = [0.0] * simulation.plan.cluster.num_devices
    ended_s = [0.0] * simulation.plan.cluster.num_devices
    optimizer_s = [0.0] * simulation.plan.cluster.num_devices
    for step in simulation.steps:
        optimizer_s[step.device] += step.end_s - step.start_s
    for wait in simulation.waits:
        waiting_s[wait.device] += wait.length_s
    parts: tuple[Span | Wait | OptimizerStep, ...] = (*simulation.spans, *simulation.waits, *simulation.steps)
    for part in parts:
        ended_s[part.device] = max(ended_s[part.device], part.end_s)
    return tuple(
        DeviceUse(
            device=device,
            compute_s=compute_s,
            optimizer_s=optimizer_s[device],
            waiting_s=waiting_s[device],
            done_early_s=simulation.step_s - ended_s[device],
            utilisation=simulation.utilisation[device],
            peak_memory_bytes=simulation.peak_memory_bytes[device],
            memory=tuple((step.at_s, step.num_bytes) for step in simulation.memory[device]),
        )
        for device, compute_s in enumerate(simulation.busy_s)
    )


def _slices(simulation: Simulation) -> tuple[SliceTimes, ...]:
    starts: dict[tuple[int, Activity], float] = {}
    ends: dict[tuple[int, Activity], float] = {}
    for span in simulation.spans:
        if span.batch:
            continue
        key = (span.slice_index, span.activity)
        starts[key] = min(starts.get(key, span.start_s), span.start_s)
        ends[key] = max(ends.get(key, span.end_s), span.end_s)
    return tuple(
        SliceTimes(
            metaop=slice_.metaop,
            ops=slice_.ops,
            num_devices=len(slice_.devices),
            micro_batch=slice_.part.strip(),
            forward_start_s=starts[index, Activity.FORWARD],
            forward_end_s=ends[index, Activity.FORWARD],
            backward_start_s=starts[index, Activity.BACKWARD],
            backward_end_s=ends[index, Activity.BACKWARD],
        )
        for index, slice_ in enumerate(simulation.plan.slices)
    )


def _waits(simulation: Simulation) -> tuple[Waiting, ...]:
    slices = simulation.plan.slices

    def metaop(index: int | None) -> str | None:
        return None if index is None else slices[index].metaop

    alike: dict[tuple[str | None, Cause, str | None], list[Wait]] = defaultdict(list)
    for wait in simulation.waits:
        alike[metaop(wait.slice_index), wait.cause, metaop(wait.source_slice_index)].append(wait)
    summaries: list[Waiting] = []
    for (waiter, cause, source), waits in alike.items():
        longest = max(waits, key=lambda wait: wait.length_s)
        summaries.append(
            Waiting(
                metaop=waiter,
                cause=cause,
                source=source,
                num_waits=len(waits),
                device_s=sum(wait.length_s for wait in waits),
                moving_device_s=sum(wait.moving_s for wait in waits),
                longest_s=longest.length_s,
                longest_device=longest.device,
                longest_source=longest.source,
            )
        )
    return tuple(sorted(summaries, key=lambda waiting: -waiting.device_s))


def headline(report: SimulationReport) -> str:
    """The iteration against the plan's own prediction, and the mean use of the devices."""
    planned_s = report.planned_iteration_s
    against = f", {report.iteration_s / planned_s - 1:+.1%} against the plan's" if planned_s > 0 else ""
    return (
        f"{report.plan} on {counted(report.num_devices, 'device')}, strategy {report.strategy}\n"
        f"iteration {format_seconds(report.iteration_s)} simulated{against} {format_seconds(planned_s)}; "
        f"devices compute {report.mean_utilisation:.0%} of it; "
        f"{format_bytes(report.transferred_bytes)} transferred, {format_bytes(report.summed_bytes)} summed"
        + _outer_step(report)
    )


def _outer_step(report: SimulationReport) -> str:
    """What islands add that average now and then alone."""
    if report.outer_every is None:
        return ""
    return (
        f"\nthe same on each of {report.islands} islands; with an outer step of "
        f"{format_seconds(report.outer_step_s)} after every {report.outer_every} steps, which is not "
        f"simulated, an iteration takes {format_seconds(report.mean_iteration_s)} in the mean"
    )


def device_table(report: SimulationReport) -> Table:
    """A row for each device; of many, those that compute least and most."""
    table = Table(title=_device_title(report), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("device", "computes", "waits", "done early", "use", "peak memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for device in _shown(report.devices):
        table.add_row(
            str(device.device),
            format_seconds(device.compute_s),
            format_seconds(device.waiting_s),
            format_seconds(device.done_early_s),
            f"{device.utilisation:.0%}",
            format_bytes(device.peak_memory_bytes),
        )
    return table


def _device_title(report: SimulationReport) -> str:
    if len(report.devices) <= MAX_DEVICES:
        return "devices"
    return f"the {MAX_DEVICES // 2} devices that compute least, and the {MAX_DEVICES // 2} that compute most"


def _shown(devices: Sequence[DeviceUse]) -> Sequence[DeviceUse]:
    if len(devices) <= MAX_DEVICES:
        return devices
    ranked = sorted(devices, key=lambda device: device.compute_s)
    return [*ranked[: MAX_DEVICES // 2], *ranked[-MAX_DEVICES // 2 :]]


def wait_table(report: SimulationReport) -> Table:
    """Where most time is spent waiting, and for whom."""
    table = Table(
        title="where devices wait, most first", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("waits")
    table.add_column("for")
    for name in ("times", "device time", "of it moving", "longest", "on", "behind"):
        table.add_column(name, justify="right", no_wrap=True)
    for waiting in report.waits[:MAX_WAITS]:
        moving = waiting.moving_device_s / waiting.device_s if waiting.device_s > 0 else 0.0
        table.add_row(
            waiting.metaop or "optimizer step",
            _source(waiting),
            str(waiting.num_waits),
            format_seconds(waiting.device_s),
            f"{moving:.0%}",
            format_seconds(waiting.longest_s),
            str(waiting.longest_device),
            str(waiting.longest_source),
        )
    return table


def _source(waiting: Waiting) -> str:
    if waiting.cause is Cause.SUM:
        return "gradient sums"
    if waiting.cause is Cause.GATHER:
        return "its new parameters"
    if waiting.cause is Cause.LEAVING:
        return f"what it sends to {waiting.source}"
    if waiting.cause is Cause.PARTNER:
        return "its partner to start"
    return f"the gradient from {waiting.source}" if waiting.cause is Cause.GRADIENT else f"{waiting.source}"
