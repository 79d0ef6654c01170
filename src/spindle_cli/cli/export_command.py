"""`spindle export`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from spindle_cli.cli import output as printed
from spindle_cli.cli.options import JsonOption, OutputOption, WorkloadOption


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    output: OutputOption,
    task: Annotated[
        str | None,
        typer.Option(
            "--task", metavar="TASK", help="One task alone, its names without the task's.", show_default=False
        ),
    ] = None,
    workload: WorkloadOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run's trained model as one safetensors file.

    From the run's newest checkpoint. Plain PyTorch loads it: the keys are those of each task module's
    state_dict(), behind the task's name. To know them, this runs the code of the workload that the checkpoint
    names (or --workload): export runs that you trust.
    """
    from spindle_cli.errors import UsageError
    from spindle_cli.export.run import export_run
    from spindle_cli.files.run_files import CHECKPOINTS_DIR
    from spindle_cli.units import format_bytes

    # Not Path.resolve, for which links in a circle are an error of its own.
    target, read = (Path(os.path.realpath(path)) for path in (output, run / CHECKPOINTS_DIR))
    if target.is_relative_to(read):
        raise UsageError(
            f"-o {output}: this command reads the checkpoints in {run}, and would write among them",
            hint="Give -o another name.",
        )
    exported = export_run(run, output, task=task, workload=workload)
    for skipped in exported.skipped:
        printed.note(f"warning: {skipped}")
    size = format_bytes(exported.num_bytes)
    text = f"{exported.file}: {exported.tensors} tensors, {size}, after step {exported.step}"
    printed.report(as_json, exported, text)
