"""What a run tells at its end: where its losses went, predicted against measured, where its files are; and
the measured timeline of its last steps as a trace, with the rows that `simulate --trace` has.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from rich.console import Group, RenderableType
from rich.table import Table

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact
from spindle_cli.files.request import workers_dir
from spindle_cli.files.run_files import (
    METRICS_FILE,
    PREDICTED_FILE,
    Comparison,
    PredictedVsMeasured,
    StartUp,
    StepMetrics,
    data_wait_s,
    slow_devices,
)
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
from spindle_cli.files.runs.records import (
    TIMELINE_FILE,
    EvaluationTimes,
    MeasuredSpan,
    MeasuredStep,
    MeasuredTimeline,
)
from spindle_cli.files.writing import write_text
from spindle_cli.launch.types import Launch
from spindle_cli.plan.types import Plan
from spindle_cli.units import counted, format_seconds

_NAMED = 8  # slow devices, at most
_HELD_UP = 0.05  # of an iteration, from which on it is said that data holds it up


class RunReport(Artifact):
    """The result of a run on one node: the document of `spindle launch --json`.

    Attributes:
        run_dir: The run's folder.
        node_rank: Which node this is.
        workers: Workers of this node.
        steps: Steps trained in this run.
        first: The first of them; null on a node without rank 0 and without a shared disk.
        last: The last of them.
        samples_per_s: Of all tasks together, over the median step.
        predicted_vs_measured: The run's predicted.json.
        evaluations: Of each task that was evaluated, predicted against measured.
        files: What the run has left, by what it is.
        skipped: Of the steps, so many changed nothing, as a gradient overflowed; None: no loss was scaled.
    """

    KIND: ClassVar[str] = "run-report"

    schema_: Annotated[Literal["spindle.run-report/1"], Field(alias="schema")] = "spindle.run-report/1"
    run_dir: str
    node_rank: int
    workers: int
    steps: int
    first: StepMetrics | None
    last: StepMetrics | None
    samples_per_s: float | None
    predicted_vs_measured: PredictedVsMeasured | None
    evaluations: tuple[EvaluationTimes, ...] = ()
    files: dict[str, str]
    skipped: int | None = None


def report_run(launch: Launch, steps: list[StepMetrics], samples_per_step: int) -> RunReport:
    """Gather a finished run's report; `steps` are those of this run.

    Raises:
        InputError: predicted.json is malformed.
    """
    predicted = launch.run_dir / PREDICTED_FILE
    return RunReport(
        run_dir=str(launch.run_dir),
        node_rank=launch.node_rank,
        workers=launch.processes,
        steps=len(steps),
        first=steps[0] if steps else None,
        last=steps[-1] if steps else None,
        samples_per_s=_samples_per_s(steps[1:] or steps, samples_per_step),
        predicted_vs_measured=PredictedVsMeasured.read(predicted) if predicted.exists() else None,
        files=_files(launch.run_dir),
        skipped=_skipped(steps),
    )


def _skipped(steps: Sequence[StepMetrics]) -> int | None:
    told = [step.skipped for step in steps if step.skipped is not None]
    return sum(told) if told else None


def _samples_per_s(steps: Sequence[StepMetrics], samples_per_step: int) -> float | None:
    """By the median of the steps; where they run different tasks, by all of them together."""
    if len({frozenset(step.task_losses) for step in steps}) > 1:
        total_s = sum(step.iteration_s for step in steps)
        return sum(step.samples_per_s * step.iteration_s for step in steps) / total_s if total_s > 0 else None
    median_s = statistics.median(step.iteration_s for step in steps) if steps else 0.0
    return samples_per_step / median_s if median_s > 0 else None


def _files(run_dir: Path) -> dict[str, str]:
    paths = {
        "metrics": run_dir / METRICS_FILE,
        "predicted against measured": run_dir / PREDICTED_FILE,
        "timeline": run_dir / TIMELINE_FILE,
        "checkpoints": run_dir / "checkpoints",
        "workers' output": workers_dir(run_dir),
    }
    return {name: str(path) for name, path in paths.items() if path.exists()}


def render_report(report: RunReport) -> RenderableType:
    """The report for people."""
    parts: list[RenderableType] = []
    if report.predicted_vs_measured is not None:
        parts.append(comparison_table(report.predicted_vs_measured))
        hint = _data_hint(report.predicted_vs_measured)
        parts.extend([] if hint is None else [hint])
        parts.extend(speed_lines(report.predicted_vs_measured))
    parts.append(_summary(report))
    parts.extend(map(_evaluation, report.evaluations))
    if report.predicted_vs_measured is not None and report.predicted_vs_measured.start_up is not None:
        parts.append(_start_up(report.predicted_vs_measured.start_up))
    parts.extend(f"  {name}: {path}" for name, path in report.files.items())
    return Group(*parts)


def _summary(report: RunReport) -> str:
    if report.first is None or report.last is None:
        return f"node {report.node_rank}: {report.workers} workers done; rank 0's node has the metrics"
    skipped = f" ({report.skipped} of them skipped)" if report.skipped else ""
    text = f"{report.steps} steps{skipped}, loss {report.first.loss:.4g} -> {report.last.loss:.4g}"
    return text if report.samples_per_s is None else f"{text}, {report.samples_per_s:.4g} samples/s"


def _evaluation(times: EvaluationTimes) -> str:
    predicted = "" if times.predicted_s is None else f"predicted {format_seconds(times.predicted_s)}, "
    count = "" if times.times == 1 else f" (median of {times.times})"
    return (
        f"evaluation of {times.task} on {times.num_samples} samples: {predicted}"
        f"measured {format_seconds(times.measured_s)}{count}"
    )


def _start_up(start: StartUp) -> str:
    stages = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in start.stages.items())
    return f"first step after {format_seconds(start.first_step_s)}: {stages}"


def comparison_table(compared: PredictedVsMeasured) -> Table:
    """Predicted and measured seconds of every MetaOp and of the iteration."""
    steps = "1 step" if compared.steps == 1 else f"median of {compared.steps} steps"
    table = Table(title=f"predicted against measured ({steps})", title_justify="left")
    table.add_column("MetaOp")
    for name in ("predicted", "measured", "error"):
        table.add_column(name, justify="right")
    for entry in compared.metaops:
        table.add_row(entry.metaop, *_cells(entry))
    table.add_section()
    table.add_row("iteration", *_cells(compared.iteration))
    if compared.devices:
        wait_s, share = data_wait_s(compared.devices), _data_share(compared)
        table.add_row("  waits for data", "", format_seconds(wait_s), f"{share:.0%} of it")
    return table


def speed_lines(compared: PredictedVsMeasured) -> list[str]:
    """How fast the types of device were, where there are several, and which devices were slow all along."""
    lines = []
    if len(compared.types) > 1:
        speeds = [
            f"{type_speed.type} {type_speed.speed:.0%} ({counted(type_speed.num_devices, 'device')})"
            for type_speed in compared.types
            if type_speed.speed is not None
        ]
        lines.append(f"speed, of the profile's: {', '.join(speeds)}")
    slow = sorted(slow_devices(compared.devices), key=lambda device: -(device.slower or 0.0))
    if slow:
        named = [f"{device.device} ({device.type}) by {device.slower:.0%}" for device in slow[:_NAMED]]
        more = f", and {len(slow) - _NAMED} more" if len(slow) > _NAMED else ""
        lines.append(f"slower than the profile all through the run: device {', '.join(named)}{more}")
    return lines


def _data_share(compared: PredictedVsMeasured) -> float:
    """The share of an iteration that its slowest device waits for data."""
    measured_s = compared.iteration.measured_s
    return min(1.0, data_wait_s(compared.devices) / measured_s) if measured_s > 0 else 0.0


def _data_hint(compared: PredictedVsMeasured) -> str | None:
    """What to do where data holds the run up."""
    if _data_share(compared) < _HELD_UP:
        return None
    return (
        f"data: {_data_share(compared):.0%} of each step waits for samples; more processes load them by "
        "`train: {loader: {workers: N}}` in the workload file, as far as the machine has cores"
    )


def _cells(times: Comparison) -> tuple[str, str, str]:
    error = "-" if times.error is None else f"{times.error:+.1%}"
    return format_seconds(times.predicted_s), format_seconds(times.measured_s), error


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
