"""`spindle report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption, OutputOption, PlanArgument


def report(
    plan: PlanArgument,
    output_path: OutputOption,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="DIR", help="The folder of a run by this plan, to show too.", show_default=False
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="PROFILE.json",
            help="The plan's profile: show whole scaling curves, and compare all strategies.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a plan as a web page: one file that works offline.

    The schedule and the simulated timeline to zoom into, scaling curves, memory and use of every device,
    strategies compared, and a run's losses and times against the prediction.
    """
    from spindle_cli.files.writing import require_no_input, require_no_other, write_text
    from spindle_cli.plan.file import read_plan, read_with_profile
    from spindle_cli.report.build import build_report
    from spindle_cli.report.page import render_page

    require_no_input("-o", output_path, plan, profile)
    require_no_other("-o", output_path)
    read, its_profile = (read_plan(plan), None) if profile is None else read_with_profile(plan, profile)
    if its_profile is not None:
        read = read.with_metaops_of(its_profile)
    data = build_report(read, profile=its_profile, run_dir=run, where=plan)
    write_text(output_path, render_page(data))
    output.note(f"wrote {output_path}")
    if as_json:
        output.print_json(data)
