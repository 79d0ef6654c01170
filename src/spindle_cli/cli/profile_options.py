"""The options of `spindle profile`, each with its meaning and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

OptionalWorkloadArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="WORKLOAD",
        help="A workload YAML file, package.module:function, or path/to/file.py:function; none with --merge.",
        show_default=False,
    ),
]
MergeOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--merge",
        metavar="PROFILE.json",
        help="Put together profiles of one workload, each made on another type of device; repeated for each.",
        show_default=False,
    ),
]
ClusterGoalOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="CLUSTER.yaml",
        help="Reach to as many devices as this cluster has.",
        show_default=False,
    ),
]
EstimateOption = Annotated[
    bool, typer.Option("--estimate", help="Compute from published peaks; runs nothing, needs no device.")
]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        metavar="N",
        help="Measure on N processes, one per device, at once.",
        show_default=False,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="With --estimate: for this device. Else what the cluster file calls this machine's CPUs.",
        show_default=False,
    ),
]
PrecisionOption = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option("--precision", help="With --estimate: of the arithmetic.", show_default=False),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, metavar="N", help="Threads of each process.", show_default=False),
]
TimeLimitOption = Annotated[
    float,
    typer.Option(
        "--time-limit",
        min=0.01,
        metavar="SECONDS",
        help="At most this long for one op on one share, and for messages of one size.",
    ),
]
DegreeOption = Annotated[
    int,
    typer.Option(
        "--tp",
        min=1,
        metavar="N",
        help="Also measure layers split 2, 4 and 8 ways, up to N; with --cluster.",
    ),
]
ReuseOption = Annotated[
    Path | None,
    typer.Option(
        "--reuse",
        metavar="PROFILE.json",
        help="Take from another profile what it has measured of equal ops: where a task was added, say.",
        show_default=False,
    ),
]
BatchesOption = Annotated[
    int,
    typer.Option(
        "--batches",
        min=1,
        metavar="N",
        help="Look at up to N batches of each task, for whether their lengths differ.",
    ),
]
PercentileOption = Annotated[
    float,
    typer.Option(
        "--length-percentile",
        min=1,
        max=100,
        metavar="P",
        help="Where they differ: measure and plan for this percentile of them; 100: the longest.",
    ),
]
NoCheckOption = Annotated[
    bool,
    typer.Option(
        "--no-check",
        help="Do not check by numbers that what may be split over the batch gives what the whole gives.",
    ),
]
WriteClusterOption = Annotated[
    Path | None,
    typer.Option(
        "--write-cluster",
        metavar="FILE",
        help="Write this machine, as measured, as a cluster file.",
        show_default=False,
    ),
]
AcceptNoiseOption = Annotated[
    bool, typer.Option("--accept-noise", help="Take times that were measured on a busy machine as they are.")
]
