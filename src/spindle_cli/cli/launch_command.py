"""`spindle launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption, PlanArgument, WorkloadOption


def launch(
    plan: PlanArgument,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, help="Iterations to train. [default: as the workload's train settings]"
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            metavar="DIR",
            help="The run's folder. [default: runs/<workload>-<n>, the first free n]",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's newest checkpoint.")] = False,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            "--checkpoint-every",
            metavar="K",
            min=1,
            help="Save a checkpoint every K steps, not only at the end.",
        ),
    ] = None,
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", min=1, help="How many checkpoints to keep, the newest.")
    ] = 3,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.json",
            help="Write the measured timeline of the last steps for ui.perfetto.dev or chrome://tracing.",
            show_default=False,
        ),
    ] = None,
    trace_steps: Annotated[
        int, typer.Option("--trace-steps", metavar="N", min=1, help="How many steps --trace writes.")
    ] = 3,
    restarts: Annotated[
        int,
        typer.Option(
            "--restarts",
            metavar="N",
            min=0,
            help="How often to start again by itself, from the newest checkpoint, after a worker was lost.",
        ),
    ] = 3,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=1,
            help="How long a worker may give no answer before it is taken to hang.",
        ),
    ] = 600,
    workload: WorkloadOption = None,
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", metavar="R", min=0, help="Which of the cluster's nodes this one is."),
    ] = None,
    master: Annotated[
        str | None, typer.Option("--master", metavar="HOST:PORT", help="An address of node 0, to meet at.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run; start nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train by a plan.

    One worker process per device. Where the plan's cluster has several nodes, run the same command on each,
    with --node-rank and --master. After a worker is lost the run goes on by itself from its newest
    checkpoint; any other failure ends it at once with the worker's error. SIGTERM ends it with a checkpoint
    and exit code 143.
    """
    from spindle_cli.launch import run
    from spindle_cli.launch.report import render_report
    from spindle_cli.launch.shell import shell_script
    from spindle_cli.launch.trace import require_writable, write_run_trace
    from spindle_cli.launch.types import LaunchOptions

    if trace is not None:
        require_writable(trace)
    prepared = run.prepare(
        plan,
        workload=workload,
        run_dir=run_dir,
        node_rank=node_rank,
        master=master,
        options=LaunchOptions(
            steps=steps,
            resume=resume,
            checkpoint_every=checkpoint_every,
            keep=keep,
            traced_steps=None if trace is None else trace_steps,
            timeout_s=timeout,
            restarts=restarts,
        ),
    )
    if dry_run:
        output.report(as_json, prepared.launch, shell_script(prepared.launch))
        return
    for warning in run.require_machine(prepared):
        output.note(f"warning: {warning}")
    going_on = run.resume_point(prepared)
    if going_on is not None:
        for skipped in going_on.skipped:
            output.note(f"warning: {skipped}")
        output.note(f"going on from {going_on.folder}")
    started = prepared.launch
    workers = "1 worker" if started.processes == 1 else f"{started.processes} workers"
    output.note(f"training {prepared.total_steps} steps with {workers} in {started.run_dir}")
    report = run.start(prepared, going_on, output.err(), output.note)
    if trace is not None:
        written = write_run_trace(trace, prepared.plan, started.run_dir)
        output.note(f"wrote {trace}" if written else "the trace is written on node 0, where rank 0 is")
    output.report(as_json, report, render_report(report))
