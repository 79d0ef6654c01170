"""A simulation as trace events: a process for each device, with lanes for compute, transfers and sums."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from spindle_cli.files.runs.chrome_trace import (
    COMPUTE,
    SENDS,
    SUMS,
    Arrow,
    Bar,
    Details,
    Level,
    TraceEvent,
    stack,
    trace_text,
)
from spindle_cli.files.writing import write_text
from spindle_cli.simulate.types import Activity, Cause, Passage, Simulation, Wait


def trace_events(simulation: Simulation) -> tuple[TraceEvent, ...]:
    """Everything that happens in a simulated step, as bars, arrows and memory levels.

    Compute and waits on the lane of the device that computes or waits; transfers on a lane of their source,
    with an arrow to what takes them; a sum or gather on a lane of each of its devices.
    """
    return (
        *_computes(simulation),
        *_waits(simulation),
        *_steps(simulation),
        *_transfers(simulation),
        *_sums(simulation),
        *_levels(simulation),
    )


def write_trace(path: Path, simulation: Simulation) -> None:
    """Write the trace file, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    cluster = simulation.plan.cluster
    names = {
        device: f"device {device}, node {cluster.node_of[device]}" for device in range(cluster.num_devices)
    }
    write_text(path, trace_text(names, trace_events(simulation)))


def _computes(simulation: Simulation) -> Iterator[TraceEvent]:
    slices = simulation.plan.slices
    for span in simulation.spans:
        slice_ = slices[span.slice_index]
        details: Details = {
            "task": simulation.plan.by_name[slice_.metaop].task,
            "dp": slice_.dp,
            "tp": slice_.tp,
        }
        name = f"{slice_.label} {span.activity}"
        yield Bar(span.device, COMPUTE, name, span.activity, span.start_s, span.end_s, details)


def _waits(simulation: Simulation) -> Iterator[TraceEvent]:
    for wait in simulation.waits:
        details = {"moving_us": wait.moving_s * 1e6, "late_us": (wait.length_s - wait.moving_s) * 1e6}
        name = f"waits for {describe_source(simulation, wait)}"
        yield Bar(wait.device, COMPUTE, name, "wait", wait.start_s, wait.end_s, details)


def _steps(simulation: Simulation) -> Iterator[TraceEvent]:
    for step in simulation.steps:
        if step.end_s > step.start_s:
            yield Bar(step.device, COMPUTE, "optimizer step", "optimizer", step.start_s, step.end_s, {})


def describe_source(simulation: Simulation, wait: Wait) -> str:
    """What a device waits for, in words."""
    if wait.cause is Cause.GATHER:
        return "its new parameters"
    if wait.source_slice_index is None:
        return "its gradient sums"
    label = simulation.plan.slices[wait.source_slice_index].label
    if wait.cause is Cause.PARTNER:
        return f"device {wait.source} to start {label} together"
    if wait.cause is Cause.LEAVING:
        return f"what it sends to {label} on device {wait.source}"
    what = "the gradient from " if wait.cause is Cause.GRADIENT else ""
    return f"{what}{label} on device {wait.source}"


def _transfers(simulation: Simulation) -> Iterator[TraceEvent]:
    taken_s: dict[tuple[int, Activity, int, int], float] = {}
    for span in simulation.spans:
        taken_s.setdefault((span.device, span.activity, span.slice_index, span.batch), span.start_s)
    slices = simulation.plan.slices
    by_source = sorted(simulation.passages, key=lambda passage: (passage.source, passage.start_s))
    for source, passages in groupby(by_source, key=lambda passage: passage.source):
        for layer, passage in stack((item.start_s, item.end_s, item) for item in passages):
            lane = SENDS if layer == 0 else f"{SENDS} {layer + 1}"
            taker = passage.producer if passage.is_gradient else passage.consumer
            activity = Activity.BACKWARD if passage.is_gradient else Activity.FORWARD
            what = "gradient for" if passage.is_gradient else "to"
            name = f"{what} {slices[taker].label} on device {passage.destination}"
            details = {"bytes": passage.num_bytes, "queued_us": (passage.start_s - passage.posted_s) * 1e6}
            yield Bar(source, lane, name, "transfer", passage.start_s, passage.end_s, details)
            batches = simulation.plan.accumulate
            yield _arrow(passage, batches, lane, taken_s[passage.destination, activity, taker, passage.batch])


def _arrow(passage: Passage, num_batches: int, lane: str, taken_s: float) -> Arrow:
    return Arrow(
        number=passage.key * num_batches + passage.batch,
        name="transfer",
        from_process=passage.source,
        from_lane=lane,
        from_s=passage.start_s,
        to_process=passage.destination,
        to_lane=COMPUTE,
        to_s=taken_s,
    )


def _sums(simulation: Simulation) -> Iterator[TraceEvent]:
    by_device = sorted(
        (
            (device, done)
            for done in simulation.collected
            for device in done.devices
            if done.group is not None  # losses, flags and norm take no time that could be seen
        ),
        key=lambda item: (item[0], item[1].start_s),
    )
    for device, items in groupby(by_device, key=lambda item: item[0]):
        for layer, done in stack((done.start_s, done.end_s, done) for _, done in items):
            lane = SUMS if layer == 0 else f"{SUMS} {layer + 1}"
            details = {"bytes": done.num_bytes, "devices": len(done.devices)}
            name = f"{done.kind} {done.group}"
            yield Bar(device, lane, name, "sum", done.start_s, done.end_s, details)


def _levels(simulation: Simulation) -> Iterator[TraceEvent]:
    for device, steps in enumerate(simulation.memory):
        for step in steps:
            yield Level(device, "memory_bytes", step.at_s, step.num_bytes)
