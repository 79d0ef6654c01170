"""Folders of runs as they would be if a profile's times were the truth: what the simulator's formulas say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from spindle_cli.calibrate.predicting import predicted_again
from spindle_cli.costs.beyond_curve import forwards_again
from spindle_cli.costs.shares import tells_shares_apart, times_of, times_of_share
from spindle_cli.files.artifact import write_json
from spindle_cli.files.run_files import (
    METRICS_FILE,
    PLAN_FILE,
    PREDICTED_FILE,
    Comparison,
    DeviceTimes,
    PassTimes,
    PredictedVsMeasured,
    SetMeasured,
    SliceTimes,
    StepMetrics,
)
from spindle_cli.files.runs.records import TIMELINE_FILE, MeasuredSpan, MeasuredStep, MeasuredTimeline
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.types import Plan, PlanMetaOp
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.points import CurvePoint, OfDevice
from spindle_cli.profile.types import MetaOpProfile, Profile
from spindle_cli.program.link import link, link_sets
from spindle_cli.program.types import Program
from spindle_cli.simulate.engine import Duration, slice_durations, step_durations

Spans = Sequence[Sequence[MeasuredSpan]]  # of each device


def slower(profile: Profile, times: Mapping[str, tuple[float, float]], *, shares: bool = False) -> Profile:
    """A profile whose MetaOps take so many times as long, forward and backward; the others as they do.

    `shares`: not by their curves alone.
    """
    metaops = tuple(
        _slower(each, *times.get(each.name, (1.0, 1.0)), shares=shares) for each in profile.metaops
    )
    # Not copied: a copy would keep the old MetaOps in `by_name`.
    return Profile(**{**{name: getattr(profile, name) for name in Profile.model_fields}, "metaops": metaops})


def slower_on(
    profile: Profile, device: str, times: Mapping[str, tuple[float, float]], samples: int | None = None
) -> Profile:
    """The same on one type of device alone, shares too; `samples`: those of so many samples alone."""
    metaops = tuple(
        _slower(each, *times.get(each.name, (1.0, 1.0)), device, samples, shares=True)
        for each in profile.metaops
    )
    return Profile(**{**{name: getattr(profile, name) for name in Profile.model_fields}, "metaops": metaops})


def _slower(
    metaop: MetaOpProfile,
    forward: float,
    backward: float,
    device: str | None = None,
    samples: int | None = None,
    *,
    shares: bool,
) -> MetaOpProfile:
    def entry(old: OfDevice) -> OfDevice:
        own = metaop.batch_size // old.dp if isinstance(old, CurvePoint) else old.samples
        if old.device != device or samples not in (None, own):
            return old
        seconds = {"forward_s": old.forward_s * forward, "backward_s": old.backward_s * backward}
        return old.model_copy(update=seconds)

    own = tuple(map(entry, metaop.shares)) if shares else metaop.shares
    return metaop.model_copy(update={"curve": tuple(map(entry, metaop.curve)), "shares": own})


def by_truth(plan: Plan, truth: Profile) -> Plan:
    """The same slices, with the times of another profile."""
    metaops = tuple(
        PlanMetaOp(**{name: getattr(truth.by_name[each.name], name) for name in PlanMetaOp.model_fields})
        for each in plan.metaops
    )
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    return Plan(**{**fields, **truth.training, "metaops": metaops})


def made_run(
    folder: Path,
    plan: Plan,
    truth: Profile,
    *,
    steps: int = 10,
    iteration_s: float | None = None,
    outside_s: float = 0.0,
    spans: Spans | None = None,
) -> Path:
    """The folder of a run of `plan` in which everything took as long as `truth` says.

    `outside_s`: of every device, in none of what is timed. `spans`: of its last step; None: no timeline.
    """
    true = by_truth(plan, seen_on(truth, plan.cluster))
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(folder / PLAN_FILE, plan)
    measured_s = predicted_again(plan, truth).iteration_s if iteration_s is None else iteration_s
    write_json(
        folder / PREDICTED_FILE,
        PredictedVsMeasured(
            steps=steps,
            iteration=Comparison(predicted_s=plan.predicted.iteration_s, measured_s=measured_s),
            slices=_slices(plan, true, link(true)),
            devices=_devices(true, outside_s),
            plan_sha256=plan.sha256(),
        ),
    )
    (folder / METRICS_FILE).write_text(StepMetrics(step=1, loss=1.0, iteration_s=measured_s).to_line())
    if spans is not None:
        write_json(folder / TIMELINE_FILE, timeline_of(plan, spans))
    return folder


def made_run_of_sets(
    folder: Path,
    plan: Plan,
    truth: Profile,
    steps: Mapping[tuple[str, ...], int],
    *,
    longer: float = 1.0,
    timeline: MeasuredTimeline | None = None,
) -> Path:
    """The same of a plan for several sets of tasks. `steps`: of those that ran. `longer`: iterations are so
    many times as long as all that is accounted for.
    """
    true = by_truth(plan, seen_on(truth, plan.cluster))
    programs = link_sets(true).of_sets
    sets = tuple(
        SetMeasured(
            tasks=tasks,
            steps=count,
            iteration=Comparison(
                predicted_s=own.predicted.iteration_s,
                measured_s=longer * predicted_again(own, truth).iteration_s,
            ),
            slices=_slices(own, true.set_plans[tasks], programs[tasks]),
            devices=_devices(true.set_plans[tasks], 0.0),
        )
        for tasks, count in steps.items()
        for own in (plan.set_plans[tasks],)
    )
    mean = [
        sum(each.steps * seconds for each, seconds in zip(sets, own, strict=True)) / sum(steps.values())
        for own in zip(
            *((each.iteration.predicted_s, each.iteration.measured_s) for each in sets), strict=True
        )
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(folder / PLAN_FILE, plan)
    write_json(
        folder / PREDICTED_FILE,
        PredictedVsMeasured(
            steps=sum(steps.values()),
            iteration=Comparison(predicted_s=mean[0], measured_s=mean[1]),
            task_sets=sets,
            plan_sha256=plan.sha256(),
        ),
    )
    (folder / METRICS_FILE).write_text(StepMetrics(step=1, loss=1.0, iteration_s=mean[1]).to_line())
    if timeline is not None:
        write_json(folder / TIMELINE_FILE, timeline)
    return folder


def _slices(plan: Plan, true: Plan, program: Program) -> tuple[SliceTimes, ...]:
    return tuple(
        SliceTimes(
            slice=index,
            forward_s=each.forward_s,
            backward_s=each.backward_s,
            shares=_shares(true, index, each) if tells_shares_apart(plan.slices[index], plan.cluster) else (),
        )
        for index, each in enumerate(slice_durations(program))
    )


def _devices(true: Plan, outside_s: float) -> tuple[DeviceTimes, ...]:
    return tuple(
        DeviceTimes(device=n, compute_s=1.0, wait_s=0, data_s=0, optimizer_s=step_s, other_s=outside_s)
        for n, step_s in enumerate(step_durations(true))
    )


def _shares(true: Plan, index: int, took: Duration) -> tuple[PassTimes, ...]:
    """Of a slice, its shares, stretched as it is. One of which nothing is known takes a third of it; of those
    that wait for each other inside of their passes all take as long as it.
    """
    piece = true.slices[index]
    metaop = true.by_name[piece.metaop]
    longest = times_of(metaop, piece, true.cluster)
    assert longest is not None
    found = []
    for share in range(piece.dp):
        each = times_of_share(metaop, piece, share, true.cluster)
        again = forwards_again(piece, metaop) / piece.num_ops
        forward = backward = 1.0 if metaop.batch_sums else 1 / 3
        if each is not None and not metaop.batch_sums:
            forward = each.forward_s / longest.forward_s
            both = [one.backward_s + again * one.forward_s for one in (each, longest)]
            backward = both[0] / both[1]
        found.append(PassTimes(forward_s=took.forward_s * forward, backward_s=took.backward_s * backward))
    return tuple(found)


def timeline_of(plan: Plan, spans: Spans, *, clock_error_s: float = 0.0) -> MeasuredTimeline:
    """One step, of ten seconds."""
    step = MeasuredStep(step=1, start_s=0.0, end_s=10.0, devices=tuple(map(tuple, spans)))
    return MeasuredTimeline(plan_sha256=plan.sha256(), clock_error_s=clock_error_s, steps=(step,))
