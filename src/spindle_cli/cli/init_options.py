"""The options of `spindle init`, each with its meaning and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

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
