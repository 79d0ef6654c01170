"""Parameters that several commands have, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
