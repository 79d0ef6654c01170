"""Parameters that several commands have, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="A plan file.", show_default=False)]
TasksOption = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="A,B",
        help="Of the steps that run just these tasks, where not every step runs all.",
        show_default=False,
    ),
]
ProfileArgument = Annotated[
    Path, typer.Argument(metavar="PROFILE.json", help="A profile file.", show_default=False)
]
WorkloadArgument = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help="A workload YAML file, package.module:function, or path/to/file.py:function.",
        show_default=False,
    ),
]
ClusterOption = Annotated[
    Path,
    typer.Option("--cluster", metavar="CLUSTER.yaml", help="The cluster to plan for.", show_default=False),
]
AssumeSameDeviceOption = Annotated[
    bool,
    typer.Option(
        "--assume-same-device",
        help="Take a profile of another type of device than the cluster's as it is.",
    ),
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="WORKLOAD",
        help="Where the workload is now, if not where the plan says.",
        show_default=False,
    ),
]
OutputOption = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
WithoutOption = Annotated[
    list[str] | None,
    typer.Option("--without", metavar="TASK", help="Leave a task out; can be repeated.", show_default=False),
]
BatchOption = Annotated[
    list[str] | None,
    typer.Option(
        "--batch",
        metavar="TASK=SIZE",
        help="Another batch size of a task; can be repeated.",
        show_default=False,
    ),
]


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
