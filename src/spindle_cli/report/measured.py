"""A measured iteration for the report: of the steps that a run has kept, the one that is most like the
others.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from spindle_cli.files.runs.timeline import TIMELINE_FILE, MeasuredSpan, MeasuredStep, MeasuredTimeline
from spindle_cli.plan.types import Plan
from spindle_cli.report.runs import runs_of
from spindle_cli.report.types import Happening, MeasuredIteration

# The order in which they are drawn: computes on top.
_LAYERS = ("wait", "data", "sum", "gather", "transfer", "optimizer", "forward", "backward")


def measured_iteration(plan: Plan, run_dir: Path) -> MeasuredIteration | None:
    """The kept step of median length; None where the run has left no timeline. Where steps run sets of
    tasks, those count whose slices are all of the plan of all tasks, which is what the report draws.

    Raises:
        InputError: the timeline is malformed, or of another plan's run.
    """
    path = run_dir / TIMELINE_FILE
    if not path.exists():
        return None
    timeline = MeasuredTimeline.read(path)
    timeline.require_of(plan.sha256(), len(plan.every_slice), plan.cluster.num_devices, where=path)
    steps = [step for step in timeline.steps if _is_drawn(step, len(plan.slices))]
    if not steps:
        return None
    usual_s = median(_length_s(step) for step in steps)
    step = min(steps, key=lambda step: abs(_length_s(step) - usual_s))
    return MeasuredIteration(
        step=step.step,
        iteration_s=_length_s(step),
        clock_error_s=timeline.clock_error_s,
        happenings=_happenings(step),
    )


def _is_drawn(step: MeasuredStep, num_slices: int) -> bool:
    return all((span.slice or 0) < num_slices for spans in step.devices for span in spans)


def _length_s(step: MeasuredStep) -> float:
    return step.end_s - step.start_s


def _happenings(step: MeasuredStep) -> tuple[Happening, ...]:
    """What happened on all devices, from the beginning of the step; what began before it is cut off there."""
    found = [
        _happening(span, device, step.start_s)
        for device, spans in enumerate(step.devices)
        for span in spans
        if span.end_s > step.start_s
    ]
    return tuple(sorted(found, key=lambda happening: _LAYERS.index(happening.kind)))


def _happening(span: MeasuredSpan, device: int, zero_s: float) -> Happening:
    devices = {device} if span.peer is None else {device, span.peer}
    return Happening(
        kind=span.kind,
        start_s=max(span.start_s - zero_s, 0.0),
        end_s=span.end_s - zero_s,
        runs=runs_of(devices),
        slice=span.slice,
        source_slice=span.source_slice,
        cause=span.cause,
        is_gradient=span.is_gradient,
        num_bytes=span.num_bytes,
    )
