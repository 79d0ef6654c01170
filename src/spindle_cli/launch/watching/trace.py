"""The measured timeline of a run's last steps as a trace, with the rows that `simulate --trace` has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spindle_cli.errors import InputError
from spindle_cli.files.runs.chrome_trace import (
    COMPUTE,
    SENDS,
    SUMS,
    Arrow,
    Bar,
    Details,
    TraceEvent,
    stack,
    trace_text,
)
from spindle_cli.files.runs.timeline import TIMELINE_FILE, MeasuredSpan, MeasuredStep, MeasuredTimeline
from spindle_cli.files.writing import write_text
from spindle_cli.plan.types import Plan

_WAITS = {
    "activation": "waits for what {} takes",
    "gradient": "waits for the gradient that {} takes",
    "leaving": "waits for what it has sent to leave",
    "sum": "waits for its gradient sums",
    "losses": "waits for the losses",
    "norm": "waits for the norm of all gradients",
    "islands": "waits for the other islands, and averages with them",
}


def require_writable(path: Path) -> None:
    """Refuse before training, not after it.

    Raises:
        InputError: the trace's folder does not exist, or the path is a folder.
    """
    if not path.absolute().parent.is_dir():
        raise InputError(f"--trace {path}: the folder {path.parent} does not exist", hint="Make it first.")
    if path.is_dir():
        raise InputError(f"--trace {path}: is a folder", hint="Name a file, for example trace.json.")


def write_run_trace(path: Path, plan: Plan, run_dir: Path) -> bool:
    """Write a finished run's trace; False where its timeline is on another node, rank 0's.

    Raises:
        InputError: the timeline is malformed, or the file cannot be written.
    """
    timeline = run_dir / TIMELINE_FILE
    if not timeline.exists():
        return False
    cluster = plan.cluster
    names = {
        device: f"device {device}, node {cluster.node_of[device]}" for device in range(cluster.num_devices)
    }
    measured = MeasuredTimeline.read(timeline)
    measured.require_of(plan.sha256(), len(plan.every_slice), cluster.num_devices, where=timeline)
    write_text(path, trace_text(names, tuple(trace_events(plan, measured))))
    return True


def trace_events(plan: Plan, timeline: MeasuredTimeline) -> Iterator[TraceEvent]:
    """Everything that was measured, step after step, as bars and arrows."""
    numbers = iter(range(2**62))
    for step in timeline.steps:
        for device, spans in enumerate(step.devices):
            yield from _computes(plan, step, device, spans)
            yield from _transfers(plan, device, spans, numbers)
    for device in range(plan.cluster.num_devices):
        yield from _collectives(timeline, device)


def _computes(
    plan: Plan, step: MeasuredStep, device: int, spans: tuple[MeasuredSpan, ...]
) -> Iterator[TraceEvent]:
    for span in spans:
        if span.kind in ("transfer", "sum", "gather"):
            continue
        details: Details = {"step": step.step}
        if span.kind in ("forward", "backward"):
            assert span.slice is not None, "a compute has its slice"
            slice_ = plan.every_slice[span.slice]
            name = f"{slice_.label} {span.kind}"
            details = {**details, "task": plan.by_name[slice_.metaop].task, "dp": slice_.dp, "tp": slice_.tp}
        elif span.kind == "wait":
            assert span.cause is not None, "a wait has its cause"
            name = _WAITS[span.cause].format("" if span.slice is None else plan.every_slice[span.slice].label)
        else:
            name = "waits for data" if span.kind == "data" else "optimizer step"
        category = "wait" if span.kind == "data" else span.kind
        yield Bar(device, COMPUTE, name, category, span.start_s, span.end_s, details)


def _transfers(
    plan: Plan, device: int, spans: tuple[MeasuredSpan, ...], numbers: Iterator[int]
) -> Iterator[TraceEvent]:
    sent = ((span.start_s, span.end_s, span) for span in spans if span.kind == "transfer")
    for layer, span in stack(sent):
        assert span.slice is not None and span.peer is not None, "a transfer has a taker"
        lane = SENDS if layer == 0 else f"{SENDS} {layer + 1}"
        what = "gradient for" if span.is_gradient else "to"
        name = f"{what} {plan.every_slice[span.slice].label} on device {span.peer}"
        yield Bar(device, lane, name, "transfer", span.start_s, span.end_s, {"bytes": span.num_bytes})
        yield Arrow(next(numbers), "transfer", device, lane, span.start_s, span.peer, COMPUTE, span.end_s)


def _collectives(timeline: MeasuredTimeline, device: int) -> Iterator[TraceEvent]:
    """Sums and gathers; of all steps together, as a gather goes on into the next one."""
    spans = (span for step in timeline.steps for span in step.devices[device])
    kept = ((span.start_s, span.end_s, span) for span in spans if span.kind in ("sum", "gather"))
    for layer, span in stack(sorted(kept, key=lambda item: item[:2])):
        lane = SUMS if layer == 0 else f"{SUMS} {layer + 1}"
        name = f"sum {span.group}" if span.kind == "sum" else f"new values of group {span.group}"
        yield Bar(device, lane, name, span.kind, span.start_s, span.end_s, {"bytes": span.num_bytes})
