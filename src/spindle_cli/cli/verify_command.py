"""`spindle verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption, PlanArgument, WorkloadOption
from spindle_cli.errors import ExitCode


def verify(
    plan: PlanArgument,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Iterations to train each way.")] = 3,
    workload: WorkloadOption = None,
    dtype: Annotated[
        Literal["float32", "float64"] | None,
        typer.Option(
            "--dtype",
            help="Convert the workload on both sides; float64 leaves rounding no room. [default: as it is]",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir", metavar="DIR", help="Keep both runs here. [default: a temporary folder, removed]"
        ),
    ] = None,
    no_randomness: Annotated[
        bool,
        typer.Option(
            "--no-randomness",
            help="Let both runs draw nothing: dropout drops nothing, other draws are their means.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Prove that a plan trains the same model.

    Trains a few steps by the plan, every device a process of this machine, and in one plain PyTorch process,
    on the same samples. Compares initial parameters, every step's losses, the first step's gradients and the
    final parameters; the exit code is 1 if they differ by more than rounding.
    """
    from spindle_cli.verify.run import verify_plan
    from spindle_cli.verify.show import render_report
    from spindle_cli.verify.types import VerifyOptions

    options = VerifyOptions(steps=steps, dtype=dtype, run_dir=run_dir, no_randomness=no_randomness)
    report = verify_plan(plan, workload, options, output.note)
    output.report(as_json, report, render_report(report))
    if not report.same:
        raise typer.Exit(ExitCode.FAILED)
