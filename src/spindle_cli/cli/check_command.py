"""`spindle check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption, PlanArgument
from spindle_cli.errors import ExitCode, UsageError


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
    complete: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="COMPLETE.yaml",
            help="With --profile: write the plan if valid, with the metaops that another tool left out.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a plan without the planner's code.

    Every op once and in order, producers before consumers, no device twice at once, only valid allocations,
    memory fits, durations as the curves say. Every violation is listed; the exit code is 1 if there is any.
    """
    from spindle_cli.account.device_memory import MEMORY_FORMULA
    from spindle_cli.check.run import check_plan
    from spindle_cli.check.types import CheckReport
    from spindle_cli.files.writing import require_no_input, require_no_other
    from spindle_cli.plan.file import read_with_profile, write_plan
    from spindle_cli.plan.search.complete import completed

    if complete is not None and profile is None:
        raise UsageError("-o: what is missing from a plan comes from its profile", hint="Add --profile.")
    if complete is not None:
        require_no_input("-o", complete, plan, profile)
        require_no_other("-o", complete, "plan")
    read, its_profile = read_with_profile(plan, profile)
    if not read.metaops and its_profile is None:
        output.note(f"warning: {plan}: no key 'metaops': batches, curves, inputs and memory need --profile")
    elif read.metaops and read.predicted.memory_formula != MEMORY_FORMULA:
        output.note(
            f"note: {plan}: peak_memory_bytes are by an earlier formula and were not compared; "
            "whether devices hold what they need was checked by today's"
        )
    violations = check_plan(read, its_profile)
    if complete is not None and its_profile is not None and not violations:
        write_plan(complete, completed(read, its_profile))
        output.note(f"wrote {complete}")
    report = CheckReport.of(str(plan), read, violations)
    output.report(as_json, report, str(report))
    if violations:
        raise typer.Exit(ExitCode.FAILED)
