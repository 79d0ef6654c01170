"""`spindle explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption, PlanArgument, TasksOption
from spindle_cli.cli.validity import CANNOT_DRAW, CANNOT_LINK, require_without, steps_of


def explain(
    plan: PlanArgument,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="PROFILE.json",
            help="The profile that the plan was made from: adds what binds, what a device is worth, and why.",
            show_default=False,
        ),
    ] = None,
    tasks: TasksOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain what binds a plan, and what one more device is worth.

    The critical chain comes from the plan itself. With the profile, the dual values of the linear program say
    what the number of devices holds up and what chains of MetaOps do; the program and the planner are run
    again for one device fewer and one more. Of each MetaOp it says why it got its devices, and of several
    types of device why these types.

    Of a plan for islands (train.local_sgd) it tells what outer steps take, also after other numbers of steps
    and in fewer bits.

    Where not every step runs all tasks, it is about the steps that take the most of the run's time, or
    those of --tasks.
    """
    from spindle_cli.check.run import check_plan
    from spindle_cli.plan.file import read_plan, read_with_profile
    from spindle_cli.questions.explain import (
        chain_table,
        headline,
        islands_table,
        islands_text,
        reason_table,
        type_reasons_text,
        worth_text,
    )
    from spindle_cli.questions.explain import explain as ask

    read, its_profile = (read_plan(plan), None) if profile is None else read_with_profile(plan, profile)
    if its_profile is not None:
        read = read.with_metaops_of(its_profile)
    # What outer steps take is that of what devices hold, which a plan with other mistakes does not say.
    require_without(CANNOT_DRAW if read.islands is None else CANNOT_LINK, plan, check_plan(read))
    explanation = ask(steps_of(read, tasks), its_profile, plan_name=str(plan))
    parts = (
        headline(explanation),
        chain_table(explanation),
        worth_text(explanation.worth),
        reason_table(explanation),
        type_reasons_text(explanation.type_reasons),
        islands_table(explanation.outer_steps),
        islands_text(explanation.outer_steps),
    )
    output.report(as_json, explanation, *(part for part in parts if part != ""))
