"""`spindle plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from spindle_cli.cli import output
from spindle_cli.cli.inputs import read_profile_and_cluster
from spindle_cli.cli.options import (
    AssumeSameDeviceOption,
    ClusterOption,
    JsonOption,
    OutputOption,
    ProfileArgument,
)


def plan(
    profile: ProfileArgument,
    cluster: ClusterOption,
    output_path: OutputOption,
    strategy: Annotated[
        Literal["spindle", "sequential", "distmm", "optimus", "dp-even", "dp-flops"],
        typer.Option(
            "--strategy", help="How the devices are shared out; the last two for devices of several types."
        ),
    ] = "spindle",
    effort: Annotated[
        int,
        typer.Option("--effort", min=0, max=9, help="Search longer for a better plan; never a worse one."),
    ] = 1,
    micro_batches: Annotated[
        list[str] | None,
        typer.Option(
            "--micro-batches",
            metavar="TASK=COUNT",
            help="Cut a task's batch into so many parts, each run forward and backward by itself; may be "
            "repeated, the tasks that are not named stay whole. By default as memory asks for.",
        ),
    ] = None,
    shard: Annotated[
        list[str] | None,
        typer.Option(
            "--shard",
            metavar="KEY=LEVEL",
            help="What the devices that hold these parameters share out: none, optimizer, gradients, "
            "parameters-kept (gathered once for both passes) or parameters; may be repeated, of what is not "
            "named optimizer state alone. By default as memory asks for.",
        ),
    ] = None,
    shard_by: Annotated[
        str | None,
        typer.Option(
            "--shard-by",
            metavar="even|memory|speed|TYPE=WEIGHT,...",
            help="Which part of what devices share out each of them has: equal ones, by free memory, by "
            "speed, or by type of device in proportion to weights. By default equal ones, and by free memory "
            "where devices of several types would else be short of it.",
            show_default=False,
        ),
    ] = None,
    equal_shares: Annotated[
        bool,
        typer.Option(
            "--equal-shares",
            help="Take numbers of devices alone that divide a batch, as runs to calibrate by need it.",
        ),
    ] = False,
    offload: Annotated[
        bool | None,
        typer.Option(
            "--offload/--no-offload",
            help="Whether activations may be moved to host memory from forward to backward where devices are "
            "short of their own. By default where the cluster file gives a link to it (links.host).",
            show_default=False,
        ),
    ] = None,
    sums: Annotated[
        Literal["auto", "dense", "rows", "factors"],
        typer.Option(
            "--sums",
            help="How gradients are summed: auto gathers those of embeddings by rows, and of dense layers by "
            "factors, where that is predicted to be faster; dense sums all as they are; rows or factors "
            "gathers all that can be gathered in this way.",
        ),
    ] = "auto",
    assume_same_device: AssumeSameDeviceOption = False,
    history: Annotated[
        Path | None,
        typer.Option(
            "--history",
            metavar="DIR",
            help="Take the times of the nearest runs or calibrated profiles in this folder that are of the "
            "same workload and type of device.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan a profiled workload for a cluster.

    Writes the plan and reports the predicted iteration. Same inputs, same bytes. Exit code 4 if no plan fits.
    """
    from spindle_cli.calibrate.links import unlike_links
    from spindle_cli.check.run import check_plan
    from spindle_cli.files.writing import require_no_input
    from spindle_cli.plan.best.micro_batches import parse_counts
    from spindle_cli.plan.best.sharding import parse_levels
    from spindle_cli.plan.file import write_plan
    from spindle_cli.plan.make import make_plan
    from spindle_cli.plan.plan_report import PlanReport
    from spindle_cli.plan.weights.choose import parse_shard_by

    counts = parse_counts(micro_batches) if micro_batches else None
    levels = parse_levels(shard) if shard else None
    parts = None if shard_by is None else parse_shard_by(shard_by)
    require_no_input("-o", output_path, profile, cluster)
    read, goal = read_profile_and_cluster(profile, cluster, assume_same_device=assume_same_device)
    notes: tuple[str, ...] = ()
    if history is not None:
        from spindle_cli.calibrate.history import from_history

        found = from_history(history, read, profile, goal)
        read, notes = found.profile, (found.note,)
        for line in found.passed_over:
            output.note(line)
    notes += unlike_links(read, goal)
    made = make_plan(
        read,
        goal,
        strategy,
        effort,
        counts,
        levels,
        equal_shares=equal_shares,
        offload=offload,
        sums=sums,
        shard_by=parts,
    )
    made = made.model_copy(update={"notes": (*notes, *made.notes)})
    violations = check_plan(made, read)
    assert not violations, "the planner broke a rule: " + "; ".join(map(str, violations))
    write_plan(output_path, made)
    report = PlanReport.of(str(output_path), made)
    output.report(as_json, report, str(report))
