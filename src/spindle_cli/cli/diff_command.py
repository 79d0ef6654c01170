"""`spindle diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption
from spindle_cli.errors import RunFailedError


def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE.yaml", help="A plan file.", show_default=False)],
    after: Annotated[Path, typer.Argument(metavar="AFTER.yaml", help="Another.", show_default=False)],
    max_growth: Annotated[
        float | None,
        typer.Option(
            "--max-growth",
            metavar="PERCENT",
            help="End with exit code 1 if the predicted iteration grows by more.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what changed between two plans."""
    from spindle_cli.plan.types import Plan
    from spindle_cli.questions.diff import change_lines, figure_table
    from spindle_cli.questions.diff import diff as ask

    difference = ask(
        Plan.read(before).outlined(),
        Plan.read(after).outlined(),
        before_name=str(before),
        after_name=str(after),
    )
    output.report(as_json, difference, figure_table(difference), change_lines(difference))
    growth = difference.iteration.growth
    if max_growth is not None and growth is not None and growth * 100 > max_growth:
        raise RunFailedError(
            f"{after}: the predicted iteration grew by {growth:.1%} over {before}'s, "
            f"more than {max_growth:g} %",
            hint="If that is meant, commit the new plan; else look at what changed above.",
        )
