"""`spindle check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption, PlanArgument
from spindle_cli.errors import ExitCode


def check(
    plan: PlanArgument,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="PROFILE.json",
            help="The profile that the plan was made from: check that the two agree.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a plan without the planner's code.

    Every op once and in order, producers before consumers, no device twice at once, only valid allocations,
    memory fits, durations as the curves say. Every violation is listed; the exit code is 1 if there is any.
    """
    from spindle_cli.check.report import CheckReport
    from spindle_cli.check.run import check_plan
    from spindle_cli.plan.file import read_plan
    from spindle_cli.profile.types import Profile

    read = read_plan(plan)
    violations = check_plan(read, None if profile is None else Profile.read(profile))
    report = CheckReport.of(str(plan), read, violations)
    output.report(as_json, report, str(report))
    if violations:
        raise typer.Exit(ExitCode.FAILED)
