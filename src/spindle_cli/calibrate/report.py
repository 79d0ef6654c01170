"""A calibration as a document, and as tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from rich import box
from rich.table import Table

from spindle_cli.calibrate.predicting import predicted_again
from spindle_cli.calibrate.reading import Run
from spindle_cli.calibrate.run import Calibrated
from spindle_cli.calibrate.times.points import known_times
from spindle_cli.calibrate.types import (
    CalibratedLink,
    CalibratedPoint,
    CalibrationReport,
    IterationPrediction,
    RunPrediction,
    SetPrediction,
)
from spindle_cli.profile.mixed.seen import of_types
from spindle_cli.units import counted, format_seconds


def report_on(made: Calibrated, profile: Path, cluster: Path | None) -> CalibrationReport:
    """Return what was changed, and what each run's iteration is predicted to take with it."""
    assert made.profile.calibration is not None, "it was just calibrated"
    pairs = [
        (old, new)
        for before, after in zip(made.before.metaops, made.profile.metaops, strict=True)
        for old, new in zip(before.curve, after.curve, strict=True)
        if (before.name, old.dp, old.tp) not in made.points.get(old.device or made.before.device.type, {})
    ]
    scaled = sum((old.forward_s, old.backward_s) != (new.forward_s, new.backward_s) for old, new in pairs)
    return CalibrationReport(
        profile=str(profile),
        cluster=None if cluster is None else str(cluster),
        runs=made.profile.calibration.runs[-len(made.runs) :],
        iterations=tuple(_iterations(made)),
        points=tuple(_points(made)),
        scaled_points=scaled,
        points_left=len(pairs) - scaled,
        links=tuple(
            CalibratedLink.model_validate(
                {
                    "link": kind,
                    "what": what,
                    "count": moved.count,
                    "predicted_s": moved.predicted_s,
                    "measured_s": moved.measured_s,
                }
            )
            for (kind, what), moved in sorted(made.moved.items())
        ),
        link_times=made.link_times,
        optimizer_s_per_byte=made.before.optimizer_s_per_byte,
        measured_optimizer_s_per_byte=made.s_per_byte,
        processor_times=made.processor_times,
        warnings=made.warnings,
    )


def _iterations(made: Calibrated) -> Iterator[RunPrediction]:
    for run in made.runs:
        predictions = [_iteration(part, made) for part in run.parts]
        if not run.plan.task_sets:
            yield RunPrediction(run=str(run.folder), **predictions[0])
            continue
        shares = run.shares
        mean = {
            name: sum(share * prediction[name] for share, prediction in zip(shares, predictions, strict=True))
            for name in predictions[0]
        }
        sets = tuple(
            SetPrediction(tasks=part.tasks or (), share=share, steps=part.measured.steps, **prediction)
            for part, share, prediction in zip(run.parts, shares, predictions, strict=True)
        )
        yield RunPrediction(run=str(run.folder), task_sets=sets, **mean)


def _iteration(run: Run, made: Calibrated) -> dict[str, float]:
    """Return the iteration's seconds of a run, or of a part of it, by the names of `IterationPrediction`."""
    slowest = max(run.measured.devices, key=lambda device: device.compute_s, default=None)
    return {
        "plan_s": run.measured.iteration.predicted_s,
        "before_s": predicted_again(run.plan, made.before).iteration_s,
        "after_s": predicted_again(run.plan, made.profile, made.times_over_links).iteration_s,
        "measured_s": run.measured.iteration.measured_s,
        "other_s": 0.0 if slowest is None else slowest.other_s or 0.0,
    }


def _points(made: Calibrated) -> Iterator[CalibratedPoint]:
    order = {metaop.name: number for number, metaop in enumerate(made.before.metaops)}
    parts = of_types(made.before)
    allocations = [(key, kind) for kind, of_type in made.points.items() for key in of_type]
    types = list(parts)
    for key, kind in sorted(
        allocations, key=lambda item: (order[item[0][0]], types.index(item[1]), *item[0][1:])
    ):
        name, ways, tp = key
        metaop, measured = parts[kind].by_name[name], made.points[kind][key]
        before, whole = known_times(metaop, ways, tp), Fraction(ways)
        yield CalibratedPoint(
            metaop=name,
            dp=int(whole) if whole.denominator == 1 else None,
            tp=tp,
            samples=float(metaop.batch_size / whole),
            device=kind if made.before.devices else None,
            steps=measured.steps,
            forward_s=before.forward_s,
            backward_s=before.backward_s,
            measured_forward_s=measured.times.forward_s,
            measured_backward_s=measured.times.backward_s,
        )


def point_table(report: CalibrationReport) -> Table:
    """Return what ran, by the samples of its shares, an op's seconds before and after."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("MetaOp")
    has_types = any(point.device is not None for point in report.points)
    if has_types:
        table.add_column("device")
    for name in (
        "samples",
        "tp",
        "forward",
        "measured",
        "backward",
        "measured",
        "times",
    ):
        table.add_column(name, justify="right")
    for point in report.points:
        before_s = point.forward_s + point.backward_s
        after_s = point.measured_forward_s + point.measured_backward_s
        table.add_row(
            point.metaop,
            *((point.device or "",) if has_types else ()),
            f"{point.samples:g}",
            str(point.tp),
            *map(
                format_seconds,
                (point.forward_s, point.measured_forward_s, point.backward_s, point.measured_backward_s),
            ),
            f"{after_s / before_s:.2f}" if before_s else "-",
        )
    return table


def summary_lines(report: CalibrationReport) -> str:
    """Return the rest: other points, links, update, processor, and each run's iteration."""
    lines = [
        f"{counted(len(report.points), 'point')} as measured, {report.scaled_points} scaled, "
        f"{report.points_left} as they were"
    ]
    for link in report.links:
        times = _times(link.measured_s, link.predicted_s)
        lines.append(
            f"{link.what} over {link.link}: {link.count} seen, {times} as long as by the plan's links"
        )
    if report.measured_optimizer_s_per_byte is not None:
        before = report.optimizer_s_per_byte
        times = f"{_times(report.measured_optimizer_s_per_byte, before)} as long as before"
        lines.append(f"update: {times if before else 'measured; the profile had none'}")
    if report.processor_times != 1.0:
        lines.append(f"processor costs: {report.processor_times:.2f} times as large as before")
    for iteration in report.iterations:
        of_steps = " (mean of the steps)" if iteration.task_sets else ""
        lines.append(f"{iteration.run}: iteration{of_steps} {_described(iteration)}")
        lines += [
            f"  {of_set.share:.0%} of the steps run {', '.join(of_set.tasks)}: {_described(of_set)}"
            for of_set in iteration.task_sets
        ]
    return "\n".join(lines)


def _described(prediction: IterationPrediction) -> str:
    return (
        f"{format_seconds(prediction.measured_s)} measured, {format_seconds(prediction.plan_s)} by its plan; "
        f"the same slices: {format_seconds(prediction.before_s)} by the profile before, "
        f"{format_seconds(prediction.after_s)} by the new one "
        f"({format_seconds(prediction.other_s)} of the measured are in no slice, wait or update)"
    )


def _times(measured: float, before: float) -> str:
    return f"{measured / before:.2f} times" if before else "not 0 times"  # links without any latency
