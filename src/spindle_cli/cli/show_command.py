"""`spindle show`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption, PlanArgument, TasksOption
from spindle_cli.cli.validity import CANNOT_DRAW, of_tasks, require, require_without
from spindle_cli.errors import UsageError

if TYPE_CHECKING:
    from spindle_cli.plan.types import Plan


def show(
    plan: PlanArgument,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank", metavar="R", min=0, help="Print the program of this rank instead.", show_default=False
        ),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            "--width",
            metavar="N",
            min=40,
            help="Characters to draw in; the terminal's if not given.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        int,
        typer.Option("--rows", metavar="N", min=1, help="At most so many rows of devices; more are merged."),
    ] = 48,
    tasks: TasksOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw a plan's schedule, or one rank's program.

    Devices from top to bottom, time from left to right, coloured by task. A bar names its MetaOp by the
    letter of the table below the picture, and [first:last] of its ops; dots are idle time.
    """
    from spindle_cli.check.run import check_plan
    from spindle_cli.plan.file import read_plan
    from spindle_cli.plan.types import Plan

    read = Plan.read(plan) if rank is None else read_plan(plan)
    violations = check_plan(read)
    if rank is not None:
        require(not violations, plan, violations)
        read = of_tasks(read, tasks)
        _print_program(read, rank, as_json)
        return
    require_without(CANNOT_DRAW, plan, violations)
    read = of_tasks(read, tasks)
    from spindle_cli.show import picture
    from spindle_cli.show.summary import summarise

    report = summarise(read)
    if as_json:
        output.print_json(report)
        return
    read = read.outlined()
    console = output.out(width)
    console.print(picture.headline(report) + "\n")
    console.print(picture.draw(read, console.width, rows))
    if console.color_system is not None:
        console.print(picture.legend(read))
    console.print(picture.allocation_table(read, report))
    console.print(picture.footer(report))


def _print_program(plan: Plan, rank: int, as_json: bool) -> None:
    from spindle_cli.program.link import link
    from spindle_cli.show.summary import RankReport
    from spindle_cli.show.text import format_rank

    last = plan.cluster.num_devices - 1
    if rank > last:
        raise UsageError(f"--rank {rank}: the plan's cluster has devices 0 to {last}")
    program = link(plan)
    output.report(as_json, RankReport.of(program, rank), format_rank(program, rank).rstrip())
