"""Options of `spindle plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

StrategyOption = Annotated[
    Literal["spindle", "sequential", "distmm", "optimus", "dp-even", "dp-flops"],
    typer.Option(
        "--strategy", help="How the devices are shared out; the last two for devices of several types."
    ),
]
EffortOption = Annotated[
    int,
    typer.Option(
        "--effort",
        min=0,
        max=9,
        help="Search longer for a better plan; on one type of device never a worse one.",
    ),
]
MicroBatchesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--micro-batches",
        metavar="TASK=COUNT",
        help="Cut a task's batch into so many parts, each run forward and backward by itself; may be "
        "repeated, the tasks that are not named stay whole. By default as memory asks for.",
    ),
]
ShardOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shard",
        metavar="KEY=LEVEL",
        help="What the devices that hold these parameters share out: none, optimizer, gradients, "
        "parameters-kept (gathered once for both passes) or parameters; may be repeated, of what is not "
        "named optimizer state alone. By default as memory asks for.",
    ),
]
ShardByOption = Annotated[
    str | None,
    typer.Option(
        "--shard-by",
        metavar="even|memory|speed|TYPE=WEIGHT,...",
        help="Which part of what devices share out each of them has: equal ones, by free memory, by "
        "speed, or by type of device in proportion to weights. By default equal ones, and by free memory "
        "where devices of several types would else be short of it.",
        show_default=False,
    ),
]
EqualSharesOption = Annotated[
    bool,
    typer.Option(
        "--equal-shares",
        help="Take numbers of devices alone that divide a batch, as runs to calibrate by need it.",
    ),
]
OffloadOption = Annotated[
    bool | None,
    typer.Option(
        "--offload/--no-offload",
        help="Whether activations may be moved to host memory from forward to backward where devices are "
        "short of their own. By default where the cluster file gives a link to it (links.host).",
        show_default=False,
    ),
]
SumsOption = Annotated[
    Literal["auto", "dense", "rows", "factors"],
    typer.Option(
        "--sums",
        help="How gradients are summed: auto gathers those of embeddings by rows, and of dense layers by "
        "factors, where that is predicted to be faster; dense sums all as they are; rows or factors "
        "gathers all that can be gathered in this way.",
    ),
]
HistoryOption = Annotated[
    Path | None,
    typer.Option(
        "--history",
        metavar="DIR",
        help="Take the times of the nearest runs or calibrated profiles in this folder that are of the "
        "same workload and type of device.",
        show_default=False,
    ),
]
