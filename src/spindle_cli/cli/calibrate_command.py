"""`spindle calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption, OutputOption, ProfileArgument


def calibrate(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders of runs that have ended; several count by their steps.",
            show_default=False,
        ),
    ],
    profile: ProfileArgument,
    output_path: OutputOption,
    write_cluster: Annotated[
        Path | None,
        typer.Option(
            "--write-cluster",
            metavar="CLUSTER.yaml",
            help="Also write the runs' cluster, with links as slow as messages and sums were; the profile "
            "is for plans over these.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Correct a profile by what runs have measured.

    Writes a copy of the profile whose curves, links, update and processor costs are the runs', so that the
    next plan starts from them. The profile itself is written over only where -o names it.
    """
    from spindle_cli.calibrate.run import calibrate as make
    from spindle_cli.calibrate.run import (
        point_table,
        report_on,
        require_outputs,
        summary_lines,
        write_calibrated,
    )
    from spindle_cli.profile.types import Profile

    require_outputs(runs, profile, output_path, write_cluster)
    made = make(runs, Profile.read(profile), profile, for_links=write_cluster is not None)
    write_calibrated(made, output_path, write_cluster)
    for warning in made.warnings:
        output.note(f"warning: {warning}")
    report = report_on(made, output_path, write_cluster)
    output.report(as_json, report, point_table(report), summary_lines(report))
