"""The report's data from a plan, and from its profile and a run where they are given.

That is the planned schedule, its MetaOps and its memory, and what the whole cluster computes over a simulated
step, in floating-point operations per second; and beside the plan every other strategy's for the same profile
and cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.traffic import communicator_bytes
from spindle_cli.check.run import check_plan, first_missing
from spindle_cli.costs.flops import arithmetic_of, flops_by_metaop, flops_by_pass, peak_flops_per_s
from spindle_cli.costs.shares import cuts_by_share
from spindle_cli.errors import InputError, NoPlanError
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan, Slice, StrategyName, strategies_on
from spindle_cli.profile.types import Profile
from spindle_cli.report.run import run_view
from spindle_cli.report.timeline import timeline_of
from spindle_cli.report.types import (
    Band,
    ClusterView,
    ClusterWork,
    HeldRange,
    MemoryUse,
    MetaOpView,
    ReportData,
    SliceView,
    StrategyView,
    equal_runs,
    runs_of,
)
from spindle_cli.simulate.run import simulate
from spindle_cli.simulate.types import Activity, Simulation, Span


@dataclass(frozen=True)
class Rows:
    """The bands, from top to bottom, and the first row of each slice (by its index in the plan)."""

    bands: tuple[Band, ...]
    row_of: tuple[int, ...]


def rows_by(plan: Plan, band_of: Mapping[str, str]) -> Rows:
    """Bands in the order of the plan's MetaOps. `band_of`: the band of each MetaOp, by its name."""
    members: dict[str, list[int]] = {band_of[metaop.name]: [] for metaop in plan.metaops}
    for index, slice_ in enumerate(plan.slices):
        members[band_of[slice_.metaop]].append(index)
    row_of = [0] * len(plan.slices)
    bands: list[Band] = []
    first_row = 0
    for name, indices in members.items():
        offsets = _pack([plan.slices[index] for index in indices])
        num_rows = 0
        for index, offset in zip(indices, offsets, strict=True):
            row_of[index] = first_row + offset
            num_rows = max(num_rows, offset + len(plan.slices[index].devices))
        if num_rows:
            bands.append(Band(name=name, first_row=first_row, num_rows=num_rows))
            first_row += num_rows
    return Rows(tuple(bands), tuple(row_of))


def _pack(slices: Sequence[Slice]) -> list[int]:
    """Return each slice's offset: its MetaOp's last one if that is free while it runs, else the lowest that
    is.
    """
    offsets = [0] * len(slices)
    placed: list[int] = []
    last_of: dict[str, int] = defaultdict(int)
    for index in sorted(range(len(slices)), key=lambda i: (slices[i].start_s, -len(slices[i].devices), i)):
        slice_ = slices[index]
        overlapping = [earlier for earlier in placed if _overlap(slices[earlier], slice_)]
        taken = sorted(
            (offsets[earlier], offsets[earlier] + len(slices[earlier].devices)) for earlier in overlapping
        )
        height = len(slice_.devices)
        wanted = last_of[slice_.metaop]
        is_free = all(end <= wanted or wanted + height <= start for start, end in taken)
        offsets[index] = wanted if is_free else _lowest_gap(taken, height)
        last_of[slice_.metaop] = offsets[index]
        placed = [earlier for earlier in placed if slices[earlier].last_s > slice_.start_s] + [index]
    return offsets


def _overlap(first: Slice, second: Slice) -> bool:
    """Whether any of their passes do."""
    return any(
        start_s < until_s and since_s < end_s
        for start_s, end_s in first.times_s
        for since_s, until_s in second.times_s
    )


def _lowest_gap(taken: Sequence[tuple[int, int]], height: int) -> int:
    """Return the lowest offset with `height` free rows; `taken`: ascending [start, end) of those that are
    not.
    """
    offset = 0
    for start, end in taken:
        if start - offset >= height:
            return offset
        offset = max(offset, end)
    return offset


BESIDE: StrategyName = "sequential"
# Decimals of seconds: nanoseconds. What differs by less has been added up in another order.
_DECIMALS = 9


def build_report(
    plan: Plan, *, profile: Profile | None = None, run_dir: Path | None = None, where: Path | None = None
) -> ReportData:
    """Everything that the report shows.

    Args:
        plan: to report on; one that breaks rules is reported on too, without a simulated timeline.
        profile: that the plan was made from, for whole curves and the other strategies.
        run_dir: of a run by this plan.
        where: the plan's file, for messages.

    Raises:
        InputError: the profile or the run belongs to another plan, a file of the run is malformed, or the
            plan names MetaOps, ops, devices or samples that do not exist, so that it cannot be drawn.
    """
    _require_drawable(plan, profile, where)
    violations = tuple(str(violation) for violation in check_plan(plan, profile))
    bound_s = plan.predicted.lower_bound_s
    by_task = rows_by(plan, {metaop.name: metaop.task for metaop in plan.metaops})
    by_component = rows_by(plan, components(plan))
    simulation = None if violations else simulate(plan)
    others = {} if profile is None else other_plans(plan, profile)
    planned = {name: made for name, made in others.items() if isinstance(made, Plan)}
    return ReportData(
        workload=plan.workload.name,
        strategy=plan.strategy,
        plan_sha256=plan.sha256(),
        cluster=_cluster(plan),
        predicted=plan.predicted,
        gap=plan.predicted.compute_s / bound_s - 1 if bound_s > 0 else None,
        num_waves=len(plan.waves),
        notes=plan.notes,
        violations=violations,
        has_profile=profile is not None,
        metaops=metaop_views(plan, profile),
        slices=slice_views(plan, by_task, by_component),
        task_bands=by_task.bands,
        component_bands=by_component.bands,
        memory=memory_views(plan),
        timeline=None if simulation is None else timeline_of(simulation),
        strategies=None if profile is None else strategy_views(plan, others),
        work=() if simulation is None else tuple(work_views(simulation, profile, planned)),
        run=None if run_dir is None else run_view(plan, run_dir),
    )


def _require_drawable(plan: Plan, profile: Profile | None, where: Path | None) -> None:
    """Refuse a plan that names what does not exist, and a profile that it was not made from."""
    unknown = first_missing(plan)
    if unknown is not None:
        raise InputError(
            f"{where or 'the plan'}: cannot be drawn: {unknown}",
            hint="`spindle check` lists all that is wrong with it.",
        )
    if profile is not None and profile.sha256() != plan.profile.sha256:
        raise InputError(
            f"{where or '--profile'}: the plan was made from another profile ({plan.profile.sha256[:19]}..., "
            f"this one is {profile.sha256()[:19]}...)",
            hint="Give the profile that `spindle plan` read, or plan again from this one.",
        )


def _cluster(plan: Plan) -> ClusterView:
    cluster = plan.cluster
    starts = [0]
    for size in cluster.node_sizes[:-1]:
        starts.append(starts[-1] + size)
    return ClusterView(
        name=cluster.name,
        device=cluster.device_type,
        num_devices=cluster.num_devices,
        node_starts=tuple(starts),
        memory_bytes=min(cluster.memory_bytes),
    )


def work_views(
    simulation: Simulation, profile: Profile | None, others: Mapping[StrategyName, Plan]
) -> Iterator[ClusterWork]:
    """View the work of the simulated plan, and behind it that of `sequential`'s where it is among the other
    strategies' plans.

    `profile`: says in which arithmetic the devices' peak is.
    """
    yield _view(simulation, profile, is_this=True)
    sequential = others.get(BESIDE)
    if sequential is not None:
        yield _view(simulate(sequential), profile, is_this=False)


def _view(simulation: Simulation, profile: Profile | None, *, is_this: bool) -> ClusterWork:
    plan, steps, flops = simulation.plan, flops_over_time(simulation), step_flops(simulation.plan)
    mean = None if flops is None or not simulation.step_s else flops / simulation.step_s
    arithmetic = None if profile is None else arithmetic_of(profile.environment)
    peak = None if arithmetic is None else peak_flops_per_s(plan.cluster.device_type, arithmetic)
    held = [[step.num_bytes for step in of_device] for of_device in simulation.memory]
    return ClusterWork(
        strategy=plan.strategy,
        is_this=is_this,
        step_s=simulation.step_s,
        flops_per_s=None if steps is None else tuple((step.at_s, step.flops_per_s) for step in steps),
        mean_flops_per_s=mean,
        peak_share=None if mean is None or peak is None else mean / (peak * plan.cluster.num_devices),
        memory=tuple(
            HeldRange(run=run, least_bytes=least, most_bytes=most)
            for run, (least, most) in equal_runs([(min(of_device), max(of_device)) for of_device in held])
        ),
    )


@dataclass(frozen=True, slots=True)
class FlopsStep:
    """From `at_s` on all devices together do `flops_per_s`."""

    at_s: float
    flops_per_s: int


def step_flops(plan: Plan) -> float | None:
    """Operations of a step, of all its batches; None where the profile has not counted them all."""
    flops = flops_by_metaop(plan.metaops)
    return None if flops is None else plan.accumulate * sum(flops.values())


def flops_over_time(simulation: Simulation) -> tuple[FlopsStep, ...] | None:
    """Return each change of what the cluster does, ascending from 0 s, the last to nothing; None where the
    profile has not counted all operations.

    A device does its share of a pass evenly over the time that it computes it, whatever it waits for in
    between. What it does again, where activations are recomputed, takes time and counts for nothing.
    """
    work = flops_by_pass(simulation.plan.metaops)
    if work is None:
        return None
    lengths: dict[tuple[int, Activity, int, int], float] = defaultdict(float)
    for span in simulation.spans:
        lengths[_pass_of(span)] += span.end_s - span.start_s
    # In whole operations per second, so that what begins and ends leaves nothing behind.
    changes: dict[float, int] = defaultdict(int, {0.0: 0})
    for span in simulation.spans:
        slice_ = simulation.plan.slices[span.slice_index]
        of_op = work[slice_.metaop][span.activity is Activity.BACKWARD]
        length_s = lengths[_pass_of(span)]
        if length_s > 0:
            rate = round(slice_.num_ops * of_op * _part_of(slice_, span.device) / length_s)
            changes[round(span.start_s, _DECIMALS)] += rate
            changes[round(span.end_s, _DECIMALS)] -= rate
    steps: list[FlopsStep] = []
    now = 0
    for at_s, change in sorted(changes.items()):
        now += change
        if not steps or change:
            steps.append(FlopsStep(at_s, now))
    return tuple(steps)


def _part_of(slice_: Slice, device: int) -> float:
    """Return the part of an op's work on its task's whole batch that one device of a slice does."""
    if slice_.rows is None:
        return 1 / (slice_.shares_of_batch * slice_.tp)
    return 1 / (cuts_by_share(slice_)[slice_.devices.index(device) // slice_.tp] * slice_.tp)


def _pass_of(span: Span) -> tuple[int, Activity, int, int]:
    """Return a device's pass of a slice, which may wait in between."""
    return span.device, span.activity, span.slice_index, span.batch


def short_name(name: str, task: str) -> str:
    """Return a MetaOp's name without its task."""
    return name.removeprefix(f"{task}/")


def components(plan: Plan) -> dict[str, str]:
    """Return the component of each MetaOp, by its name; where the plan does not say, its short name."""
    return {metaop.name: metaop.component or short_name(metaop.name, metaop.task) for metaop in plan.metaops}


def metaop_views(plan: Plan, profile: Profile | None) -> tuple[MetaOpView, ...]:
    """MetaOps in the plan's order; curves and fits are the profile's where it is given."""
    device_s: dict[str, float] = defaultdict(float)
    for slice_ in plan.slices:
        device_s[slice_.metaop] += slice_.busy_s * len(slice_.devices)
    index_of = {metaop.name: index for index, metaop in enumerate(plan.metaops)}
    component_of = components(plan)
    views = []
    for metaop in plan.metaops:
        profiled = None if profile is None else profile.by_name.get(metaop.name)
        views.append(
            MetaOpView(
                name=metaop.name,
                short=short_name(metaop.name, metaop.task),
                task=metaop.task,
                component=component_of[metaop.name],
                num_ops=metaop.num_ops,
                batch_size=metaop.batch_size,
                inputs=tuple(index_of[name] for name in metaop.inputs),
                curve=metaop.curve if profiled is None else profiled.curve,
                fit=None if profiled is None else profiled.fit,
                device_s=device_s[metaop.name],
            )
        )
    return tuple(views)


def slice_views(plan: Plan, by_task: Rows, by_component: Rows) -> tuple[SliceView, ...]:
    """Slices in the order of `plan.slices`."""
    index_of = {metaop.name: index for index, metaop in enumerate(plan.metaops)}
    wave_of = [wave.index for wave in plan.waves for _ in wave.slices]
    return tuple(
        SliceView(
            metaop=index_of[slice_.metaop],
            ops=slice_.ops,
            wave=wave_of[index],
            runs=runs_of(slice_.devices),
            num_devices=len(slice_.devices),
            dp=slice_.dp,
            tp=slice_.tp,
            rows=slice_.rows,
            part=slice_.part,
            recompute=slice_.recompute,
            selective=slice_.selective,
            offload=slice_.offload,
            start_s=slice_.start_s,
            end_s=slice_.end_s,
            backward_s=slice_.backward_s,
            task_row=by_task.row_of[index],
            component_row=by_component.row_of[index],
        )
        for index, slice_ in enumerate(plan.slices)
    )


def memory_views(plan: Plan) -> tuple[MemoryUse, ...]:
    """Memory of every device by account/device_memory.py, neighbours with the same merged."""
    held = device_memory(plan.metaops, plan.slices, plan.cluster, plan, communicator_bytes(plan), plan.turn)
    both: Sequence[object] = list(zip(held, plan.cluster.memory_bytes, strict=True))
    return tuple(
        MemoryUse(
            run=run,
            parameter_bytes=held[run[0]].parameter_bytes,
            gradient_bytes=held[run[0]].gradient_bytes,
            optimizer_bytes=held[run[0]].optimizer_bytes,
            activation_bytes=held[run[0]].activation_bytes,
            buffer_bytes=held[run[0]].buffer_bytes,
            allocator_bytes=held[run[0]].allocator_bytes,
            outside_bytes=held[run[0]].outside_bytes,
            capacity_bytes=plan.cluster.memory_bytes[run[0]],
        )
        for run, _ in equal_runs(both)
    )


def other_plans(plan: Plan, profile: Profile) -> dict[StrategyName, Plan | NoPlanError]:
    """Return the plans of the strategies that are not the plan's own, in the contract's order; or why there
    is none.
    """
    names = strategies_on(plan.cluster)
    return {name: _made(plan, profile, name) for name in names if name != plan.strategy}


def _made(plan: Plan, profile: Profile, strategy: StrategyName) -> Plan | NoPlanError:
    try:
        return make_plan(profile, plan.cluster, strategy)
    except NoPlanError as error:  # said in the report, where it is part of the comparison
        return error


def strategy_views(plan: Plan, others: Mapping[StrategyName, Plan | NoPlanError]) -> tuple[StrategyView, ...]:
    """Strategies in the contract's order; the plan's own is the plan as it is."""
    names = strategies_on(plan.cluster)
    return tuple(
        _strategy_view(name, plan if name == plan.strategy else others[name], plan) for name in names
    )


def _strategy_view(strategy: StrategyName, made: Plan | NoPlanError, this: Plan) -> StrategyView:
    if isinstance(made, NoPlanError):
        return StrategyView(strategy=strategy, is_this=False, predicted=None, failure=made.message)
    return StrategyView(strategy=strategy, is_this=made is this, predicted=made.predicted)
