"""A run as far as calibrating needs it: its plan, what each slice took, and what its last steps moved.

Where steps ran several sets of tasks, each set's steps are a part of the run, by the set's plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from spindle_cli.account.joint import joint_groups
from spindle_cli.account.traffic import uses_of
from spindle_cli.account.types import Joint
from spindle_cli.costs.shares import sizes, tells_shares_apart, times_of, times_of_share
from spindle_cli.errors import InputError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.run_files import METRICS_FILE, PLAN_FILE, PREDICTED_FILE, PredictedVsMeasured
from spindle_cli.files.runs.records import TIMELINE_FILE, MeasuredSpan, MeasuredStep, MeasuredTimeline
from spindle_cli.plan.file import read_plan
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.profile.mixed.seen import devices_of, is_of_devices, seen_on
from spindle_cli.profile.types import MetaOpProfile, Profile

FEWEST_STEPS = 3
MOST_S = 1e9  # more is no measurement; sums of them stay finite


@dataclass(frozen=True)
class Run:
    """A run that has ended, or the part of it that ran the same tasks. `timeline`: None where it has left
    none. `tasks`: of a part; None: every step ran all.
    """

    folder: Path
    plan: Plan
    measured: PredictedVsMeasured
    timeline: MeasuredTimeline | None
    tasks: tuple[str, ...] | None = None

    @cached_property
    def parts(self) -> tuple[Run, ...]:
        """By the sets of tasks that steps ran, in the order in which they first did; itself where all ran
        all.
        """
        return tuple(self._of_sets()) if self.plan.task_sets and self.tasks is None else (self,)

    def _of_sets(self) -> Iterator[Run]:
        for measured_set in self.measured.task_sets:
            set_plan = plan_of_set(self.plan, measured_set.tasks)
            assert set_plan is not None, "`read_run` has seen to it"
            measured = PredictedVsMeasured(
                steps=measured_set.steps,
                iteration=measured_set.iteration,
                slices=measured_set.slices,
                devices=measured_set.devices,
            )
            timeline = None if self.timeline is None else timeline_of_set(self.timeline, set_plan)
            yield Run(self.folder, set_plan, measured, timeline, measured_set.tasks)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of all steps that each part ran in, by the plan; among the measured steps, where the plan
        does not say it of all.
        """
        planned = {task_share.tasks: task_share.share for task_share in self.plan.task_sets}
        shares = [planned.get(part.tasks or (), 0.0) for part in self.parts]
        if not all(shares):
            shares = [float(part.measured.steps) for part in self.parts]
        return tuple(share / sum(shares) for share in shares)

    @property
    def name(self) -> str:
        """The name of the run for people: its folder, and the tasks where it is a part of a run."""
        return f"{self.folder}" + ("" if self.tasks is None else f", steps of {', '.join(self.tasks)}")

    @property
    def is_short(self) -> bool:
        """Whether so few steps were measured that their medians say little."""
        return self.measured.steps < FEWEST_STEPS


def parts_of(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Return the parts of all runs, in their order."""
    return tuple(part for run in runs for part in run.parts)


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run that has begun."""
    return any((folder / name).is_file() for name in (PREDICTED_FILE, METRICS_FILE))


def read_run(folder: Path) -> Run:
    """Return a run's plan and what was measured.

    Raises:
        InputError: no run, one that has not ended, or whose plan is not there; a file is damaged, or of
            another plan.
    """
    predicted_path, plan_path, timeline_path = (
        folder / name for name in (PREDICTED_FILE, PLAN_FILE, TIMELINE_FILE)
    )
    if not predicted_path.exists():
        raise _not_ended(folder)
    if not plan_path.exists():
        raise InputError(
            f"{folder}: the plan of this run is not in it ({PLAN_FILE})",
            hint=f"Runs leave it there when they end. Put the plan that was run there as {PLAN_FILE}, or run "
            "again.",
        )
    measured, plan = PredictedVsMeasured.read(predicted_path), read_plan(plan_path)
    if measured.plan_sha256 is not None and measured.plan_sha256 != plan.sha256():
        raise InputError(
            f"{plan_path}: it is not the plan that was run ({predicted_path} names "
            f"{measured.plan_sha256[:19]}..., this one is {plan.sha256()[:19]}...)",
            hint="Put the plan that was run there, or run again.",
        )
    run = Run(folder, plan, measured, None)
    _require_sets(run, predicted_path)
    for part in run.parts:
        _require_sound(part, predicted_path)
    timeline = MeasuredTimeline.read(timeline_path) if timeline_path.exists() else None
    if timeline is not None:
        num_slices = len(plan.every_slice)
        timeline.require_of(plan.sha256(), num_slices, plan.cluster.num_devices, where=timeline_path)
    return replace(run, timeline=timeline)


def _not_ended(folder: Path) -> InputError:
    if is_run(folder):
        return InputError(
            f"{folder}: {PREDICTED_FILE} is not in it: the run has not come to its end",
            hint="Go on with it by `spindle launch --resume`, or give a run that has ended.",
        )
    return InputError(
        f"{folder}: neither {METRICS_FILE} nor {PREDICTED_FILE} is in it",
        hint="Give the folder of a run that has ended (`spindle launch --run-dir`).",
    )


def _require_sets(run: Run, path: Path) -> None:
    """Require that what is said of each set of tasks, in a run whose steps ran several, is said of a set of
    its plan.
    """
    if not run.plan.task_sets:
        return
    task_sets = [measured_set.tasks for measured_set in run.measured.task_sets]
    if not task_sets:
        raise InputError(
            f"{path}: task_sets: not every step of this run ran all tasks, and what slices took in the steps "
            "of each set of tasks is missing; the run is of an older version",
            hint="Run the plan again with this version.",
        )
    for number, tasks in enumerate(task_sets):
        again = tasks in task_sets[:number]
        if again or not run.plan.metaops or plan_of_set(run.plan, tasks) is None:
            raise InputError(
                f"{path}: task_sets: {', '.join(tasks)}: "
                + ("there twice" if again else "the plan that was run has nothing for them"),
                hint="The file is damaged, or of a run by another plan; run the plan again.",
            )


def _require_sound(run: Run, path: Path) -> None:
    """Refuse what is said of other slices or devices than the plan's, or of times that nothing takes."""
    plan, measured = run.plan, run.measured
    where = "slices" if run.tasks is None else f"task_sets: {', '.join(run.tasks)}: slices"
    indices = [measured_slice.slice for measured_slice in measured.slices]
    if not indices:
        raise InputError(
            f"{path}: {where}: what each slice took is missing; the run is of an older version",
            hint="Run the plan again with this version.",
        )
    if indices != list(range(len(plan.slices))):
        raise InputError(
            f"{path}: {where}: expected each of the plan's {len(plan.slices)} slices once, in order",
            hint="The file is damaged, or of a run by another plan; run the plan again.",
        )
    most_s = max(_seconds_of(measured))
    if most_s > MOST_S:
        raise InputError(
            f"{path}: {most_s:g} s are no measurement; expected at most {MOST_S:g}",
            hint="The file is damaged; run the plan again.",
        )
    devices = [device.device for device in measured.devices if device.device >= plan.cluster.num_devices]
    if devices:
        raise InputError(
            f"{path}: device {devices[0]} is not in the plan", hint="Give the folder of a run by this plan."
        )


def _seconds_of(measured: PredictedVsMeasured) -> Iterator[float]:
    """Yield every time that is measured of an iteration, its slices and devices, and what was predicted."""
    yield from (measured.iteration.predicted_s, measured.iteration.measured_s)
    for measured_slice in measured.slices:
        for passes in (measured_slice, *measured_slice.shares):
            yield from (passes.forward_s, passes.backward_s)
    for device in measured.devices:
        yield from (device.optimizer_s, device.other_s or 0.0)


def require_belongs(run: Run, profile: Profile, profile_path: Path) -> None:
    """Refuse a run that says nothing of a profile's times.

    Raises:
        InputError: it is of another workload or type of device, of other settings that change times, or ran
            on shares that the profile does not have.
    """
    plan, folder = run.plan, run.folder
    if plan.workload.fingerprint != profile.workload.fingerprint:
        raise InputError(
            f"{folder}: a run of workload {plan.workload.name!r} ({plan.workload.fingerprint[:19]}...); "
            f"{profile_path} is of {profile.workload.name!r} ({profile.workload.fingerprint[:19]}...)",
            hint="Give a run of the profile's workload, or that workload's profile.",
        )
    if not is_of_devices(profile, plan.cluster):
        raise InputError(
            f"{folder}: a run on devices {' and '.join(map(repr, plan.cluster.types))}; {profile_path} is of "
            f"{' and '.join(f'{device.name!r} (type {device.type!r})' for device in devices_of(profile))}",
            hint="Give a run on the profile's types of device, or a profile that has those of the run.",
        )
    require_same_settings(plan, profile, f"{folder}: a run by a plan", profile_path)
    seen = seen_on(profile, plan.cluster)
    for part in run.parts:
        _require_shares(part)
        for slice_ in part.plan.slices:
            metaop = seen.by_name.get(slice_.metaop)
            if metaop is None or not _has_shares(metaop, slice_, plan.cluster):
                raise InputError(
                    f"{folder}: slice {slice_.label} ran on {_described(metaop, slice_)}, which "
                    f"{profile_path} has no times of",
                    hint="Give the profile that the run's plan was made from.",
                )


def _require_shares(run: Run) -> None:
    for took, slice_ in zip(run.measured.slices, run.plan.slices, strict=True):
        if tells_shares_apart(slice_, run.plan.cluster) and len(took.shares) != slice_.dp:
            why = "the devices are of several types" if run.plan.cluster.is_mixed else "they are not equal"
            raise InputError(
                f"{run.folder / PREDICTED_FILE}: slices: slice {took.slice}, {slice_.label}: what "
                f"each share took is not said ({len(took.shares)} found, expected {slice_.dp}), and {why}; "
                "the run is of an older version, or the file damaged",
                hint="Run the plan again with this version.",
            )


def _has_shares(metaop: MetaOpProfile, slice_: Slice, cluster: Cluster) -> bool:
    """Whether a profile has what a plan says a slice takes; where types differ, of each of its shares."""
    if not cluster.is_mixed:
        return times_of(metaop, slice_, cluster) is not None
    return all(times_of_share(metaop, slice_, share, cluster) is not None for share in range(slice_.dp))


def _described(metaop: MetaOpProfile | None, slice_: Slice) -> str:
    """Say how a slice's batch was cut."""
    degrees = f"dp {slice_.dp}, tp {slice_.tp}"
    if metaop is None or (slice_.rows is None and slice_.micro_batches == 1):
        return degrees
    samples = {*(sizes(slice_) or (metaop.batch_size // slice_.shares_of_batch,))}
    return f"{degrees}, in shares of {' and '.join(map(str, sorted(samples, reverse=True)))} samples"


def require_same_settings(one: Plan | Profile, profile: Profile, where: str, profile_path: Path) -> None:
    """Refuse a plan, or another profile, with other settings that change times without changing the
    workload's fingerprint; `where`: of what it is.

    Raises:
        InputError: one of them differs.
    """
    expected, others = _settings(profile), _settings(one)
    for name, value in expected.items():
        if others[name] != value:
            raise InputError(
                f"{where}: of {name} {others[name]}; {profile_path} has {value}",
                hint="Profile and plan again with these settings, or give what has those of the profile.",
            )


def _settings(one: Plan | Profile) -> dict[str, int | str | float | bool | None]:
    if isinstance(one, Plan):
        threads, compiled = one.threads_per_process, one.compile
    else:
        setting = one.environment.get("threads_per_process")
        threads, compiled = setting if isinstance(setting, int) and setting >= 1 else None, one.compiled_by
    return {
        "threads_per_process": threads,
        "compile": compiled,
        "loss_chunks": one.loss_chunks,
        "accumulate": one.accumulate,
    }


def plan_of_set(plan: Plan, tasks: Sequence[str]) -> Plan | None:
    """Return what steps ran that ran just these tasks; None where the plan has nothing for them."""
    set_plan = plan.set_plans.get(tuple(tasks))
    if set_plan is not None:
        return set_plan
    return plan if set(tasks) == {metaop.task for metaop in plan.metaops} else None


def timeline_of_set(timeline: MeasuredTimeline, set_plan: Plan) -> MeasuredTimeline:
    """Return the steps that ran a set's plan, with its own numbers of slices and parameter groups."""
    assert set_plan.joint is not None, "a set's plan runs in turn with others"
    place = {index: number for number, index in enumerate(set_plan.joint.members[set_plan.member])}
    group = _own_groups(set_plan, place)
    tasks = set_plan.joint.tasks[set_plan.member]
    steps = [
        step.model_copy(
            update={"devices": tuple(tuple(_renumbered(spans, place, group)) for spans in step.devices)}
        )
        for step in timeline.steps
        if _ran_by(step, set_plan.joint) == tasks
    ]
    return timeline.model_copy(update={"steps": tuple(steps)})


def _own_groups(set_plan: Plan, place: Mapping[int, int]) -> dict[int, int]:
    """Number the parameter groups of all plans that one plan adds to as that plan numbers them."""
    assert set_plan.joint is not None
    groups = joint_groups(
        set_plan.joint, uses_of(set_plan), set_plan.cluster, set_plan.gradient_bytes_per_param
    )
    added_to = [group.index for group in groups if not place.keys().isdisjoint(group.slices)]
    return {index: number for number, index in enumerate(added_to)}


def _ran_by(step: MeasuredStep, joint: Joint) -> set[str]:
    """Return the tasks that a step ran."""
    spans = (span for spans in step.devices for span in spans)
    slices = {span.slice for span in spans if span.kind == "forward" and span.slice is not None}
    return {joint.by_name[joint.slices[index].metaop].task for index in slices}


def _renumbered(
    spans: Sequence[MeasuredSpan], place: Mapping[int, int], group: Mapping[int, int]
) -> Iterator[MeasuredSpan]:
    """Spans of all plans' slices as those of one; what is of no slice of it is left out."""
    for span in spans:
        if any(index is not None and index not in place for index in (span.slice, span.source_slice)):
            continue
        yield span.model_copy(
            update={
                "slice": None if span.slice is None else place[span.slice],
                "source_slice": None if span.source_slice is None else place[span.source_slice],
                "group": None if span.group is None else group.get(span.group),
            }
        )
