"""`spindle plan` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from spindle_cli.cli import output
from spindle_cli.cli.inputs import read_profile_and_cluster
from spindle_cli.cli.options import (
    AssumeSameDeviceOption,
    ClusterOption,
    JsonOption,
    OutputOption,
    ProfileArgument,
    StrategyOption,
)

if TYPE_CHECKING:
    from spindle_cli.files.cluster import Cluster
    from spindle_cli.profile.types import Profile


def plan(
    profile: ProfileArgument,
    cluster: ClusterOption,
    output_path: OutputOption,
    strategy: StrategyOption = "spindle",
    effort: EffortOption = 1,
    micro_batches: MicroBatchesOption = None,
    shard: ShardOption = None,
    shard_by: ShardByOption = None,
    equal_shares: EqualSharesOption = False,
    offload: OffloadOption = None,
    sums: SumsOption = "auto",
    assume_same_device: AssumeSameDeviceOption = False,
    history: HistoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan a profiled workload for a cluster.

    Writes the plan and reports the predicted iteration. Same inputs, same bytes. Exit code 4 if no plan fits.
    """
    from spindle_cli.calibrate.links import unlike_links
    from spindle_cli.check.run import check_plan
    from spindle_cli.files.writing import require_no_input, require_no_other
    from spindle_cli.plan.best.request import parse_counts, parse_levels, parse_shard_by
    from spindle_cli.plan.file import write_plan
    from spindle_cli.plan.make import make_plan
    from spindle_cli.plan.plan_report import PlanReport

    counts = parse_counts(micro_batches) if micro_batches else None
    levels = parse_levels(shard) if shard else None
    parts = None if shard_by is None else parse_shard_by(shard_by)
    require_no_input("-o", output_path, profile, cluster)
    require_no_other("-o", output_path, "plan")
    read, goal = read_profile_and_cluster(profile, cluster, assume_same_device=assume_same_device)
    read, notes = _by_history(history, read, profile, goal)
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


def _by_history(
    history: Path | None, read: Profile, path: Path, cluster: Cluster
) -> tuple[Profile, tuple[str, ...]]:
    """A profile, or the nearest calibrated one or run's in a folder, and what a plan by it has to say."""
    if history is None:
        return read, ()
    from spindle_cli.calibrate.history import from_history

    chosen = from_history(history, read, path, cluster)
    for line in chosen.passed_over:
        output.note(line)
    return chosen.profile, (chosen.note,)


EffortOption = Annotated[
    int,
    typer.Option(
        "--effort",
        min=0,
        max=9,
        help="Search longer for a better plan; on one type of device never a worse one.",
    ),
]
MicroBatchesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--micro-batches",
        metavar="TASK=COUNT",
        help="Cut a task's batch into so many parts, each run forward and backward by itself; may be "
        "repeated, the tasks that are not named stay whole. By default as memory asks for.",
    ),
]
ShardOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shard",
        metavar="KEY=LEVEL",
        help="What the devices that hold these parameters share out: none, optimizer, gradients, "
        "parameters-kept (gathered once for both passes) or parameters; may be repeated, of what is not "
        "named optimizer state alone. By default as memory asks for.",
    ),
]
ShardByOption = Annotated[
    str | None,
    typer.Option(
        "--shard-by",
        metavar="even|memory|speed|TYPE=WEIGHT,...",
        help="Which part of what devices share out each of them has: equal ones, by free memory, by "
        "speed, or by type of device in proportion to weights. By default equal ones, and by free memory "
        "where devices of several types would else be short of it.",
        show_default=False,
    ),
]
EqualSharesOption = Annotated[
    bool,
    typer.Option(
        "--equal-shares",
        help="Take numbers of devices alone that divide a batch, as runs to calibrate by need it.",
    ),
]
OffloadOption = Annotated[
    bool | None,
    typer.Option(
        "--offload/--no-offload",
        help="Whether activations may be moved to host memory from forward to backward where devices are "
        "short of their own. By default where the cluster file gives a link to it (links.host).",
        show_default=False,
    ),
]
SumsOption = Annotated[
    Literal["auto", "dense", "rows", "factors"],
    typer.Option(
        "--sums",
        help="How gradients are summed: auto gathers those of embeddings by rows, and of dense layers by "
        "factors, where that is predicted to be faster; dense sums all as they are; rows or factors "
        "gathers all that can be gathered in this way.",
    ),
]
HistoryOption = Annotated[
    Path | None,
    typer.Option(
        "--history",
        metavar="DIR",
        help="Take the times of the nearest runs or calibrated profiles in this folder that are of the "
        "same workload and type of device.",
        show_default=False,
    ),
]
