"""The report's data from a plan, and from its profile and a run where they are given."""

from __future__ import annotations

from pathlib import Path

from spindle_cli.check.run import check_plan
from spindle_cli.check.structure import names_and_ranges, rows_of_shares
from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile
from spindle_cli.report.rows import rows_by
from spindle_cli.report.run import run_view
from spindle_cli.report.schedule_data import components, memory_views, metaop_views, slice_views
from spindle_cli.report.strategies import other_plans, strategy_views
from spindle_cli.report.timeline import timeline_of
from spindle_cli.report.types import ClusterView, ReportData
from spindle_cli.report.work import work_views
from spindle_cli.simulate.run import simulate


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
    unknown = next(iter(names_and_ranges(plan)), None) or next(
        iter(rows_of_shares(plan, is_complete=bool(plan.metaops))), None
    )
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
