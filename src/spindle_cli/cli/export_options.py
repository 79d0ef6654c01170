"""Options of `spindle export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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
