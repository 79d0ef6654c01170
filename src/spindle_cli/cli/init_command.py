"""`spindle init` and its options, each with its meaning and limits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption

if TYPE_CHECKING:
    from rich.table import Table

    from spindle_cli.init.types import InitReport


def init(
    model: ModelArgument,
    folder: FolderOption = None,
    arguments: ArgumentsOption = None,
    fields: FieldsOption = None,
    loss: LossOption = None,
    batch_size: BatchSizeOption = 8,
    nproc: DevicesOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a workload file and its Python stub for a model of yours.

    Beside them a cluster file of this machine. It runs the code of the model: its tasks, the blocks that it
    repeats (candidate operators), the fields of its batches and its losses are found by looking at it.
    """
    from spindle_cli.init.run import InitRequest, write_start

    report = write_start(
        InitRequest(
            model=model,
            folder=folder,
            arguments=_arguments(arguments or []),
            fields=tuple(fields or ()),
            loss=loss,
            batch_size=batch_size,
            num_devices=nproc,
            overwrite=force,
        )
    )
    output.note(f"wrote {report.workload}\nwrote {report.stub}")
    output.note(f"{'wrote' if report.has_measured else 'kept'} {report.cluster}")
    output.report(as_json, report, _repeated_blocks_table(report), *_remarks(report))


def _arguments(texts: list[str]) -> dict[str, Any]:
    """Raises: UsageError: no NAME=VALUE, or a value that is no YAML."""
    from spindle_cli.errors import InputError, UsageError
    from spindle_cli.files.artifact import parse_yaml

    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or name in arguments:
            problem = "is given twice" if name in arguments else "is not NAME=VALUE"
            raise UsageError(
                f"--arg {text!r} {problem}", hint="Expected an argument's name, = and a value in YAML."
            )
        try:
            arguments[name] = parse_yaml(value, where=f"--arg {name}")
        except InputError as error:
            raise UsageError(
                error.message, hint="Expected a value in YAML: 4, 0.1, true, [1, 2], text."
            ) from error
    return arguments


def _repeated_blocks_table(report: InitReport) -> Table:
    from rich.table import Table

    table = Table(
        title="operators: blocks that the model repeats", title_justify="left", box=None, padding=(0, 1, 0, 0)
    )
    for column in ("class", "first"):
        table.add_column(column, no_wrap=True)
    for column in ("modules", "equal", "parameters"):
        table.add_column(column, justify="right")
    for block in report.operators:
        table.add_row(
            f"{block.module}.{block.name}",
            block.first,
            str(block.count),
            str(block.equal),
            f"{block.parameters:,}",
        )
    return table


def _remarks(report: InitReport) -> list[str]:
    from spindle_cli.units import counted

    lines = [
        f"task {task.name}: {', '.join(f'{name} {list(shape)}' for name, shape in task.fields.items())}; "
        f"loss: {task.loss}"
        for task in report.tasks
    ]
    if not report.operators:
        lines.append("No block is repeated: each task is one op. List your layers' classes in `operators`.")
    lines += [f"{op.task}/{op.op} is not split over the batch: {op.because}" for op in report.coupled]
    lines.append(
        f"{counted(len(report.metaops), 'MetaOp')}: "
        + ", ".join(f"{name} x{ops}" for name, ops in report.metaops.items())
    )
    lines.append(
        f"Put your own data into {report.stub}, then: spindle profile {report.workload} "
        f"--cluster {report.cluster} -o profile.json"
    )
    return lines


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:name or path/to/file.py:name: a class of nn.Module, or a function that returns "
        "a model, or a dict of them by task.",
        show_default=False,
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        help="Where the files go; by default beside the model's file, or here.",
        show_default=False,
    ),
]
ArgumentsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        metavar="NAME=VALUE",
        help="An argument of the model, or of its Hugging Face configuration; can be repeated.",
        show_default=False,
    ),
]
FieldsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        metavar="NAME=SHAPE",
        help="What one sample has: image=3x224x224, tokens=128:int32000, label=int10; can be repeated.",
        show_default=False,
    ),
]
LossOption = Annotated[
    Literal["cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss"]
    | None,
    typer.Option("--loss", help="Of what the model returns, where that is no loss.", show_default=False),
]
BatchSizeOption = Annotated[
    int, typer.Option("--batch-size", min=1, metavar="N", help="Samples of every task in an iteration.")
]
DevicesOption = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        metavar="N",
        help="Devices of the cluster file; by default this machine's GPUs, or up to 8 of its cores.",
        show_default=False,
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace files that are there.")]
