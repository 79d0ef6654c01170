"""Options of `spindle sweep`; `spindle compare` takes additions, too."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="N,N,...",
        help="Numbers of devices; by default 1, 2, 4, ... up to the cluster's.",
        show_default=False,
    ),
]
AddOption = Annotated[
    list[str] | None,
    typer.Option(
        "--add",
        metavar="TYPE=N,...",
        help="The cluster as it is, and with N more devices of a type, or of a group of nodes, each by "
        "itself; can be repeated.",
        show_default=False,
    ),
]
PriceOption = Annotated[
    float | None,
    typer.Option(
        "--price",
        min=0,
        max=1e9,  # as in cluster files
        help="Price of a device for an hour; adds each iteration's cost. By default the cluster file's.",
        show_default=False,
    ),
]
StrategyOption = Annotated[
    Literal["spindle", "sequential", "distmm", "optimus", "dp-even", "dp-flops"],
    typer.Option(
        "--strategy", help="How the devices are shared out; the last two for devices of several types."
    ),
]
