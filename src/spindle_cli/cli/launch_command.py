"""`spindle launch`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption, PlanArgument, WorkloadOption
from spindle_cli.errors import UsageError

if TYPE_CHECKING:
    from spindle_cli.launch.report import RunReport
    from spindle_cli.launch.run import Prepared


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
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Where starting again does not help, plan again for one device fewer and go on.",
        ),
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", metavar="N", min=1, help="With --elastic: begin on N devices of the plan's."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="PROFILE.json",
            help="With --elastic: what the plan was made from. [default: found beside the plan]",
            show_default=False,
        ),
    ] = None,
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
    from spindle_cli.elastic.run import Elastic
    from spindle_cli.launch import run
    from spindle_cli.launch.report import render_report
    from spindle_cli.launch.shell import shell_script
    from spindle_cli.launch.trace import require_writable, write_run_trace
    from spindle_cli.launch.types import LaunchOptions

    if trace is not None:
        require_writable(trace)
    options = LaunchOptions(
        steps=steps,
        resume=resume,
        checkpoint_every=checkpoint_every,
        keep=keep,
        traced_steps=None if trace is None else trace_steps,
        timeout_s=timeout,
        restarts=restarts,
    )

    def prepare(path: Path, goes_on: bool = False) -> Prepared:
        return run.prepare(
            path,
            workload=workload,
            run_dir=prepared.launch.run_dir if goes_on else run_dir,
            node_rank=node_rank,
            master=master,
            options=replace(options, resume=resume or goes_on),
        )

    if (nproc is not None or profile is not None) and not elastic:
        raise UsageError("--nproc and --profile are for --elastic")
    if trace is not None and elastic:
        raise UsageError("--trace is of one plan, and --elastic may make others")
    prepared = prepare(plan)
    fewer = Elastic.of(prepared, plan, profile, prepare, output.note) if elastic else None
    if fewer is not None and nproc is not None and nproc < prepared.plan.cluster.num_devices:
        prepared = fewer.on_fewer(prepared, nproc, goes_on=False)
    if dry_run:
        output.report(as_json, prepared.launch, shell_script(prepared.launch))
        return
    start = partial(train, or_anew=elastic and not resume)
    report = start(prepared) if fewer is None else fewer.train(prepared, start)
    if trace is not None:
        written = write_run_trace(trace, prepared.plan, prepared.launch.run_dir)
        output.note(f"wrote {trace}" if written else "the trace is written on node 0, where rank 0 is")
    output.report(as_json, report, render_report(report))


def train(prepared: Prepared, *, or_anew: bool) -> RunReport:
    """Train to the end, and say on standard error where it begins; `or_anew`: see `run.resume_point`."""
    from spindle_cli.launch import run

    for warning in run.require_machine(prepared):
        output.note(f"warning: {warning}")
    going_on = run.resume_point(prepared, or_anew=or_anew)
    if going_on is not None:
        for skipped in going_on.skipped:
            output.note(f"warning: {skipped}")
        output.note(f"going on from {going_on.folder}")
    started = prepared.launch
    workers = "1 worker" if started.processes == 1 else f"{started.processes} workers"
    output.note(f"training {prepared.total_steps} steps with {workers} in {started.run_dir}")
    return run.start(prepared, going_on, output.err(), output.note)
