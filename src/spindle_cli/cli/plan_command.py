"""`spindle plan`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from spindle_cli.cli import output
from spindle_cli.cli.options import ClusterOption, JsonOption, OutputOption, ProfileArgument


def plan(
    profile: ProfileArgument,
    cluster: ClusterOption,
    output_path: OutputOption,
    strategy: Annotated[
        Literal["spindle", "sequential", "distmm", "optimus"],
        typer.Option("--strategy", help="How the devices are shared out."),
    ] = "spindle",
    effort: Annotated[
        int,
        typer.Option("--effort", min=0, max=9, help="Search longer for a better plan; never a worse one."),
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Plan a profiled workload for a cluster.

    Writes the plan and reports the predicted iteration. Same inputs, same bytes. Exit code 4 if no plan fits.
    """
    from spindle_cli.check.run import check_plan
    from spindle_cli.files.cluster import Cluster
    from spindle_cli.plan.file import write_plan
    from spindle_cli.plan.make import make_plan
    from spindle_cli.plan.report import PlanReport
    from spindle_cli.profile.types import Profile

    read = Profile.read(profile)
    made = make_plan(read, Cluster.read(cluster), strategy, effort)
    violations = check_plan(made, read)
    assert not violations, "the planner broke a rule: " + "; ".join(map(str, violations))
    write_plan(output_path, made)
    report = PlanReport.of(str(output_path), made)
    output.report(as_json, report, str(report))
