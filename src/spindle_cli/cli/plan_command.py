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
    """Plan a profiled workload for a cluster."""
    from spindle_cli.cluster import Cluster
    from spindle_cli.plan.file import write_plan
    from spindle_cli.plan.make import make_plan
    from spindle_cli.profile.types import Profile

    made = make_plan(Profile.read(profile), Cluster.read(cluster), strategy, effort)
    write_plan(output_path, made)
    output.note(f"wrote {output_path}")
    if as_json:
        output.print_json(made.predicted)
