"""The options of `spindle launch`, each with its meaning and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PlanOrScriptArgument = Annotated[
    Path,
    typer.Argument(metavar="PLAN.yaml", help="A plan file; or a script, with --plan.", show_default=False),
]
ScriptArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ARGS]...", help="Arguments of the script.", show_default=False),
]
PlanOption = Annotated[
    Path | None,
    typer.Option("--plan", metavar="PLAN.yaml", help="The plan that a script trains by.", show_default=False),
]
StepsOption = Annotated[
    int | None,
    typer.Option("--steps", min=1, help="Iterations to train. [default: as the workload's train settings]"),
]
RunDirOption = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        metavar="DIR",
        help="The run's folder. [default: runs/<workload>-<n>, the first free n]",
    ),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on from the run's newest checkpoint.")]
AllowChangedDataOption = Annotated[
    bool,
    typer.Option(
        "--allow-changed-data",
        help="With --resume: go on though a task's data is another than the run was trained on.",
    ),
]
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="DIR",
        help="Begin a new run with what another one has trained, maybe on other tasks: its folder, or one of "
        "its checkpoints'.",
        show_default=False,
    ),
]
CheckpointEveryOption = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-every",
        metavar="K",
        min=1,
        help="Save a checkpoint every K steps, not only at the end.",
    ),
]
KeepOption = Annotated[
    int, typer.Option("--keep", metavar="N", min=1, help="How many checkpoints to keep, the newest.")
]
AsyncOption = Annotated[
    bool,
    typer.Option(
        "--async-checkpoints",
        help="With --checkpoint-every: write them while training goes on, from a copy in host memory.",
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE.json",
        help="Write the measured timeline of the last steps for ui.perfetto.dev or chrome://tracing.",
        show_default=False,
    ),
]
TraceStepsOption = Annotated[
    int, typer.Option("--trace-steps", metavar="N", min=1, help="How many steps --trace writes.")
]
RestartsOption = Annotated[
    int,
    typer.Option(
        "--restarts",
        metavar="N",
        min=0,
        help="How often to start again by itself, from the newest checkpoint, after a worker was lost.",
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=1,
        help="How long a worker may give no answer before it is taken to hang.",
    ),
]
ElasticOption = Annotated[
    bool,
    typer.Option(
        "--elastic",
        help="Where starting again does not help, plan again for one device fewer and go on.",
    ),
]
FewerOption = Annotated[
    int | None,
    typer.Option("--nproc", metavar="N", min=1, help="With --elastic: begin on N devices of the plan's."),
]
MadeFromOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="PROFILE.json",
        help="With --elastic: what the plan was made from. [default: found beside the plan]",
        show_default=False,
    ),
]
NodeRankOption = Annotated[
    int | None,
    typer.Option("--node-rank", metavar="R", min=0, help="Which of the cluster's nodes this one is."),
]
MasterOption = Annotated[
    str | None, typer.Option("--master", metavar="HOST:PORT", help="An address of node 0, to meet at.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would run; start nothing.")]
