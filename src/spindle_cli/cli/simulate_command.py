"""`spindle simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption, PlanArgument, TasksOption
from spindle_cli.cli.validity import CANNOT_LINK, of_tasks, require_without


def simulate(
    plan: PlanArgument,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.json",
            help="Write the timeline for ui.perfetto.dev or chrome://tracing.",
            show_default=False,
        ),
    ] = None,
    tasks: TasksOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict a plan's timeline without devices.

    Runs every device's program over the cluster's links, event by event: what each device computes when, how
    transfers and gradient sums share the links, where devices wait and for whom, what each holds in memory.
    """
    from spindle_cli.check.run import check_plan
    from spindle_cli.files.writing import require_no_input, require_no_other
    from spindle_cli.plan.file import read_plan
    from spindle_cli.simulate.events import write_trace
    from spindle_cli.simulate.run import simulate as run
    from spindle_cli.simulate.simulation_report import device_table, headline, report_of, wait_table

    if trace is not None:
        require_no_input("--trace", trace, plan)
        require_no_other("--trace", trace)
    read = read_plan(plan)
    require_without(CANNOT_LINK, plan, check_plan(read))
    simulation = run(of_tasks(read, tasks))
    if trace is not None:
        write_trace(trace, simulation)
        output.note(f"wrote {trace}")
    report = report_of(str(plan), simulation)
    output.report(as_json, report, headline(report), "", device_table(report), wait_table(report))
