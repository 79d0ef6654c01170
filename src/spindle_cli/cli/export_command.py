"""`spindle export` and its options."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from spindle_cli.cli import output as printed
from spindle_cli.cli.options import JsonOption, WorkloadOption


def export(
    run: RunArgument,
    output: OutputOption,
    task: TaskOption = None,
    module: ModuleOption = None,
    shard_size: ShardSizeOption = None,
    peft: PeftOption = None,
    like: LikeOption = None,
    ema: EmaOption = False,
    workload: WorkloadOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run's trained model as safetensors.

    From the run's newest checkpoint, tensor by tensor. Plain PyTorch loads it: the keys are those of each
    task module's state_dict(), behind the task's name. To know them, this runs the code of the workload that
    the checkpoint names (or --workload): export runs that you trust.
    """
    from spindle_cli.errors import UsageError
    from spindle_cli.export.run import export_run
    from spindle_cli.export.types import ExportOptions
    from spindle_cli.files.run_files import CHECKPOINTS_DIR
    from spindle_cli.files.writing import require_no_other
    from spindle_cli.units import counted, format_bytes, parse_bytes

    require_no_other("-o", output)
    # Not Path.resolve, for which links in a circle are an error of its own.
    target, read = (Path(os.path.realpath(path)) for path in (output, run / CHECKPOINTS_DIR))
    if target.is_relative_to(read):
        raise UsageError(
            f"-o {output}: this command reads the checkpoints in {run}, and would write among them",
            hint="Give -o another name.",
        )
    shard_bytes = None if shard_size is None else parse_bytes(shard_size)
    if shard_size is not None and shard_bytes is None:
        raise UsageError(f"--shard-size {shard_size}: expected a size such as 5GB, 500MB or 2GiB")
    options = ExportOptions(
        task=task,
        module=module,
        peft=None if peft is None else peft.value,
        like=like,
        shard_bytes=shard_bytes,
        workload=workload,
        averaged=ema,
    )
    exported = export_run(run, output, options)
    for skipped in exported.skipped:
        printed.note(f"warning: {skipped}")
    size = format_bytes(exported.num_bytes)
    files = f" in {counted(len(exported.files), 'file')}" if exported.files else ""
    text = f"{exported.file}: {exported.tensors} tensors, {size}{files}, after step {exported.step}"
    printed.report(as_json, exported, text)


class Peft(StrEnum):
    """What is written of a PEFT model."""

    ADAPTERS = "adapters"
    MERGED = "merged"


RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)]
OutputOption = Annotated[
    Path,
    typer.Option(
        "-o", "--output", metavar="PATH", help="The file, or the folder, to write.", show_default=False
    ),
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task", metavar="TASK", help="One task alone, its names without the task's.", show_default=False
    ),
]
ModuleOption = Annotated[
    str | None,
    typer.Option(
        "--module", metavar="NAME", help="Of the task's module, this one alone.", show_default=False
    ),
]
ShardSizeOption = Annotated[
    str | None,
    typer.Option(
        "--shard-size",
        metavar="SIZE",
        help="A folder with shards of at most this size (5GB) and their index, for from_pretrained.",
        show_default=False,
    ),
]
PeftOption = Annotated[
    Peft | None,
    typer.Option(
        "--peft",
        help="Of a PEFT model: a folder with its adapters, or with the model they are merged into.",
        show_default=False,
    ),
]
LikeOption = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="PATH",
        help="What init_from has taken from this path, under its names there, in a folder.",
        show_default=False,
    ),
]
EmaOption = Annotated[
    bool,
    typer.Option("--ema", help="The moving average of the weights (train.ema) in place of them."),
]
