"""A profile corrected by runs: read them, take from each what it measured, put it into the curves, write that
down, and report it as a document and as tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from statistics import median

import yaml
from pydantic import ValidationError
from rich import box
from rich.table import Table

from spindle_cli.account.traffic import traffic_of
from spindle_cli.calibrate.beside import Beside, processor_times
from spindle_cli.calibrate.links import (
    slower_links,
    update_s_per_byte,
    with_links_of,
    with_processor_times,
    with_slower_links,
)
from spindle_cli.calibrate.moving import Moved, moved_in, times_of_links
from spindle_cli.calibrate.predicting import NO_TIMES, predicted_again
from spindle_cli.calibrate.reading import FEWEST_STEPS, Run, parts_of, read_run, require_belongs
from spindle_cli.calibrate.times.curves import calibrated_metaops
from spindle_cli.calibrate.times.points import Points, all_runs, known_times, measured_points
from spindle_cli.calibrate.types import (
    CalibratedLink,
    CalibratedPoint,
    CalibrationReport,
    IterationPrediction,
    RunPrediction,
    SetPrediction,
)
from spindle_cli.errors import InputError, UsageError
from spindle_cli.files.artifact import shown, write_json
from spindle_cli.files.run_files import PLAN_FILE, PREDICTED_FILE
from spindle_cli.files.runs.records import TIMELINE_FILE
from spindle_cli.files.writing import require_no_input, require_no_other, write_text
from spindle_cli.profile.mixed.seen import devices_of, of_types, seen_on, together
from spindle_cli.profile.types import CalibratedRun, Calibration, Profile
from spindle_cli.units import counted, format_seconds

# So many times as long as by their cluster file are hardly its links: a worker that waits for a core looks
# the same.
_CROWDED = 3.0
# A share of an iteration that is no time that anything was held up: times in plans are rounded.
HARDLY = 1e-6


@dataclass(frozen=True)
class Calibrated:
    """A corrected profile, and what it was corrected by.

    Attributes:
        before: the profile as it was.
        runs: that were taken.
        points: what they have measured of the curves, by the profile's types of device.
        moved: by kind of link and what moved ("messages", "sums"), what was seen, against the plans' links.
        processor_times: by what the processor's costs were multiplied.
        s_per_byte: of the optimizer's step, as measured; None: it was not.
        for_links: the profile is for plans over links as slow as `link_times` says.
    """

    profile: Profile
    before: Profile
    runs: tuple[Run, ...]
    points: Mapping[str, Points]
    moved: Mapping[tuple[str, str], Moved]
    processor_times: float
    s_per_byte: float | None
    for_links: bool = False

    @property
    def times_over_links(self) -> Mapping[str, float]:
        """How many times as long as by the runs' links messages take where the profile is for."""
        return self.link_times if self.for_links else NO_TIMES

    @property
    def link_times(self) -> dict[str, float]:
        """How many times as long as predicted all took that was seen to move, by kind of link."""
        return times_of_links(self.moved)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes it uncertain, for people."""
        short = tuple(
            f"{part.name}: only {counted(part.measured.steps, 'step')} measured (the first of a run is left "
            f"out); expected {FEWEST_STEPS} or more, as single steps vary"
            for part in parts_of(self.runs)
            if part.is_short
        )
        crowded = tuple(
            f"{kind}: messages and sums took {times:.1f} times as long as by the runs' links; workers that "
            "wait for a core look the same: unless the links are so slow, let them run on cores of their own "
            "and calibrate again"
            for kind, times in self.link_times.items()
            if times >= _CROWDED
        )
        never = [device.type for device in devices_of(self.before) if device.type not in self.points]
        if not never:
            return (*short, *crowded)
        left = f"no run had devices of type {', '.join(never)}, whose times stay as they were"
        return (*short, *crowded, left)


def calibrate(
    folders: Sequence[Path], profile: Profile, profile_path: Path, *, for_links: bool = False
) -> Calibrated:
    """Correct a profile by runs. Same inputs, same profile.

    Args:
        folders: of the runs, each once.
        profile_path: of the profile, for messages.
        for_links: for plans over links as slow as they were, of which waits for messages are no longer a part
            of what is left; else over the runs' own.

    Raises:
        InputError: a run has not ended, is damaged, or does not belong to the profile.
    """
    runs = tuple(read_run(folder) for folder in folders)
    for run in runs:
        require_belongs(run, profile, profile_path)
    return calibrated_by(runs, profile, for_links=for_links)


def calibrated_by(runs: tuple[Run, ...], profile: Profile, *, for_links: bool = False) -> Calibrated:
    """Correct a profile by runs that belong to it; see `calibrate`.

    Raises:
        InputError: their times make no profile.
    """
    try:
        return _calibrated_by(runs, profile, for_links=for_links)
    except ValidationError as error:
        names = ", ".join(str(run.folder) for run in runs)
        problem = error.errors()[0]
        raise InputError(
            f"{names}: the times of these runs make no profile: {problem['loc'][-1]} would be "
            f"{shown(problem['input'])} ({problem['msg']})",
            hint=f"See whether {PREDICTED_FILE} or the profile is damaged.",
        ) from error


def _calibrated_by(runs: tuple[Run, ...], profile: Profile, *, for_links: bool) -> Calibrated:
    parts = [(part, traffic_of(part.plan)) for part in parts_of(runs)]
    host_work = [Beside.of(part, seen_on(profile, part.plan.cluster), traffic) for part, traffic in parts]
    times = processor_times(host_work)
    of_parts = [
        measured_points(part, profile, of_part.stretches(times))
        for (part, _), of_part in zip(parts, host_work, strict=True)
    ]
    by_type = of_types(profile)
    points = _points_by_type(of_parts, by_type)
    moved = _joined(moved_in(part, traffic, part.plan.cluster) for part, traffic in parts)
    over_own_links = _joined(
        moved_in(part, traffic, with_links_of(part.plan.cluster, profile.links)) for part, traffic in parts
    )
    s_per_byte = update_s_per_byte(parts_of(runs), profile)
    measured = iter(of_parts)
    records = [_record(run, list(islice(measured, len(run.parts))), by_type) for run in runs]
    record = Calibration(runs=_with(profile.calibration, records), links=times_of_links(moved))
    fields = {name: getattr(profile, name) for name in type(profile).model_fields}
    fields |= {
        "metaops": together(
            profile,
            {kind: calibrated_metaops(of_type, points.get(kind, {})) for kind, of_type in by_type.items()},
        ),
        "links": slower_links(profile.links, times_of_links(over_own_links)),
        "processor": with_processor_times(profile.processor, times),
        "optimizer_s_per_byte": profile.optimizer_s_per_byte if s_per_byte is None else s_per_byte,
        "calibration": record,
    }
    share = held_up(runs, Profile(**fields), record.links if for_links else NO_TIMES)
    record = Calibration(runs=record.runs, links=record.links, held_up=share)
    made = Profile(**{**fields, "calibration": record})
    return Calibrated(made, profile, runs, points, moved, times, s_per_byte, for_links)


def _points_by_type(of_parts: Sequence[Mapping[str, Points]], types: Iterable[str]) -> dict[str, Points]:
    """Join, for each of a profile's types of device, what parts of runs have measured on it."""
    return {
        kind: all_runs(by_type[kind] for by_type in of_parts if kind in by_type)
        for kind in types
        if any(kind in by_type for by_type in of_parts)
    }


def held_up(runs: Sequence[Run], accounted: Profile, link_times: Mapping[str, float] = NO_TIMES) -> float:
    """Return the share by which the runs' iterations, each by its steps, are longer than a profile accounts
    for; 0 where they are not. Steps of several sets of tasks count by those of each.

    Args:
        accounted: calibrated by the runs, but for this.
        link_times: see `predicted_again`.
    """
    parts = parts_of(runs)
    measured_s = sum(part.measured.steps * part.measured.iteration.measured_s for part in parts)
    accounted_s = sum(
        part.measured.steps * predicted_again(part.plan, accounted, link_times).iteration_s for part in parts
    )
    share = measured_s / accounted_s - 1
    return share if share > HARDLY else 0.0


def _joined(of_runs: Iterable[Mapping[tuple[str, str], Moved]]) -> dict[tuple[str, str], Moved]:
    total: dict[tuple[str, str], Moved] = {}
    for by_link in of_runs:
        for key, moved in by_link.items():
            total[key] = total.get(key, Moved()) + moved
    return total


def _record(
    run: Run, of_parts: Sequence[Mapping[str, Points]], by_type: Mapping[str, Profile]
) -> CalibratedRun:
    """`of_parts`: what each of the run's parts has measured."""
    cluster, iteration = run.plan.cluster, run.measured.iteration
    errors = [
        abs(measured.times.op_s / before - 1)
        for points in of_parts
        for kind, by_allocation in points.items()
        for (name, ways, tp), measured in by_allocation.items()
        if (before := known_times(by_type[kind].by_name[name], ways, tp).op_s) > 0
    ]
    return CalibratedRun(
        name=run.folder.resolve().name,
        sha256=run.measured.sha256(),
        plan_sha256=run.plan.sha256(),
        num_devices=cluster.num_devices,
        num_nodes=len(cluster.node_sizes),
        steps=run.measured.steps,
        predicted_s=iteration.predicted_s,
        measured_s=iteration.measured_s,
        metaop_error=median(errors) if errors else 0.0,
        worst_metaop_error=max(errors, default=0.0),
    )


def _with(before: Calibration | None, records: Sequence[CalibratedRun]) -> tuple[CalibratedRun, ...]:
    """Return the runs of earlier calibrations and new ones; a run that is taken again counts once."""
    again = {record.sha256 for record in records}
    earlier = () if before is None else before.runs
    return (*(record for record in earlier if record.sha256 not in again), *records)


def require_outputs(runs: Sequence[Path], profile: Path, output: Path, cluster: Path | None) -> None:
    """Refuse to write over what is read, but for the profile where the output is named as it is; and a run
    that is given twice.

    Raises:
        UsageError: one of these.
    """
    inputs = [run / name for run in runs for name in (PLAN_FILE, PREDICTED_FILE, TIMELINE_FILE)]
    is_profile = output.absolute() == profile.absolute()
    require_no_input("-o", output, *inputs, *(() if is_profile else (profile,)))
    require_no_other("-o", output, "profile")
    if cluster is not None:
        require_no_input("--write-cluster", cluster, *inputs, profile, output)
        require_no_other("--write-cluster", cluster, "cluster")
        if cluster.absolute() == output.absolute():
            raise UsageError(
                f"--write-cluster {cluster}: -o names the same file", hint="Give one of them another name."
            )
    given: set[Path] = set()
    for run in runs:
        if run.resolve() in given:
            raise UsageError(f"{run}: this run is given twice", hint="Give each run once.")
        given.add(run.resolve())


def write_calibrated(made: Calibrated, output: Path, cluster: Path | None) -> None:
    """Write the profile, and the cluster if one is wanted, each whole or not at all.

    Raises:
        InputError: a file cannot be written; or the runs are of several clusters, or have seen nothing move.
    """
    text = None if cluster is None else _cluster_text(made)
    write_json(output, made.profile)
    if cluster is not None and text is not None:
        write_text(cluster, text)


def _cluster_text(made: Calibrated) -> str:
    cluster = made.runs[0].plan.cluster
    for run in made.runs[1:]:
        if run.plan.cluster != cluster:
            raise InputError(
                f"--write-cluster: {made.runs[0].folder} ran on {cluster.name!r}, and {run.folder} on "
                f"{run.plan.cluster.name!r} or over other links",
                hint="Give runs of plans for one and the same cluster file.",
            )
    if not made.link_times:
        raise InputError(
            "--write-cluster: nothing was seen to move over any link in the last steps of these runs",
            hint="Run with `spindle launch --trace FILE.json`, which notes when sums end; or leave it out.",
        )
    data = with_slower_links(cluster, made.link_times).model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    seen = ", ".join(f"{kind} {times:.4g}" for kind, times in sorted(made.link_times.items()))
    head = f"Calibrated by runs; times as long as before: {seen}."
    return f"# {head}\n{yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110)}"


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
