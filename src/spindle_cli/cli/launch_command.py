"""`spindle launch`."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.cli import output
from spindle_cli.cli.evaluation_times import evaluation_times
from spindle_cli.cli.launch_options import (
    AllowChangedDataOption,
    AsyncOption,
    CheckpointEveryOption,
    DryRunOption,
    ElasticOption,
    FewerOption,
    FromOption,
    KeepOption,
    MadeFromOption,
    MasterOption,
    NodeRankOption,
    PlanOption,
    PlanOrScriptArgument,
    RestartsOption,
    ResumeOption,
    RunDirOption,
    ScriptArguments,
    StepsOption,
    TimeoutOption,
    TraceOption,
    TraceStepsOption,
)
from spindle_cli.cli.options import JsonOption, WorkloadOption
from spindle_cli.errors import InputError, UsageError
from spindle_cli.process.at_once import ending_at_once
from spindle_cli.units import counted

if TYPE_CHECKING:
    from spindle_cli.launch.owner import Hold
    from spindle_cli.launch.run import Prepared
    from spindle_cli.launch.starting.head_start import HeadStart
    from spindle_cli.launch.watching.run_report import RunReport
    from spindle_cli.plan.types import Plan


def launch(
    plan: PlanOrScriptArgument,
    script_args: ScriptArguments = None,
    plan_of_script: PlanOption = None,
    steps: StepsOption = None,
    run_dir: RunDirOption = None,
    resume: ResumeOption = False,
    allow_changed_data: AllowChangedDataOption = False,
    begin_from: FromOption = None,
    checkpoint_every: CheckpointEveryOption = None,
    keep: KeepOption = 3,
    async_checkpoints: AsyncOption = False,
    trace: TraceOption = None,
    trace_steps: TraceStepsOption = 3,
    restarts: RestartsOption = 3,
    timeout: TimeoutOption = 600,
    elastic: ElasticOption = False,
    nproc: FewerOption = None,
    profile: MadeFromOption = None,
    workload: WorkloadOption = None,
    node_rank: NodeRankOption = None,
    master: MasterOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train by a plan.

    With a script (SCRIPT.py --plan PLAN.yaml) every worker runs that, and trains by a spindle.Trainer in it.
    One worker process per device. Where the plan's cluster has several nodes, run the same command on each,
    with --node-rank and --master. After a worker is lost the run goes on by itself from its newest
    checkpoint; any other failure ends it at once with the worker's error. SIGTERM ends it with a checkpoint
    and exit code 143.
    """
    begun_s = time.time()
    from spindle_cli.files.writing import require_no_input, require_no_other
    from spindle_cli.launch import run
    from spindle_cli.launch.owner import Hold
    from spindle_cli.launch.starting.head_start import HeadStart
    from spindle_cli.launch.starting.shell import shell_script
    from spindle_cli.launch.types import LaunchOptions
    from spindle_cli.launch.watching.run_report import render_report
    from spindle_cli.launch.watching.trace import require_writable

    script, plan = _script_and_plan(plan, plan_of_script, script_args or [])
    if async_checkpoints and checkpoint_every is None:
        raise UsageError("--async-checkpoints is for --checkpoint-every")
    if allow_changed_data and not resume:
        raise UsageError("--allow-changed-data is for --resume")
    if (nproc is not None or profile is not None) and not elastic:
        raise UsageError("--nproc and --profile are for --elastic")
    if trace is not None:
        require_no_input("--trace", trace, plan, *([] if script is None else [script]))
        require_no_other("--trace", trace)
        require_writable(trace)
    options = LaunchOptions(
        steps=steps,
        resume=resume,
        begin_from=begin_from,
        checkpoint_every=checkpoint_every,
        keep=keep,
        async_checkpoints=async_checkpoints,
        traced_steps=None if trace is None else trace_steps,
        timeout_s=timeout,
        restarts=restarts,
        script=script,
        script_args=tuple(script_args or []),
    )

    def prepare(path: Path, goes_on: bool = False, head_start: HeadStart | None = None) -> Prepared:
        return run.prepare(
            path,
            workload=workload,
            run_dir=hold.run_dir if goes_on else run_dir,
            node_rank=node_rank,
            master=master,
            options=replace(options, resume=resume or goes_on),
            begun_s=None if goes_on else begun_s,
            head_start=head_start,
        )

    with ending_at_once(signal.SIGINT, signal.SIGTERM), HeadStart() as head_start, Hold() as hold:
        prepared = prepare(plan, head_start=None if dry_run else head_start)
        fewer = None
        if elastic:
            from spindle_cli.elastic.run import Elastic  # with the planner, which no other launch needs

            fewer = Elastic.of(prepared, plan, profile, prepare, output.note)
            prepared = fewer.begin(prepared, nproc)
        if dry_run:
            _say_consent(prepared.plan)
            output.report(as_json, prepared.launch, shell_script(prepared.launch))
            return
        start = partial(
            train,
            or_anew=elastic and not resume,
            allows_changed_data=allow_changed_data,
            hold=hold,
            head_start=head_start,
        )
        prepared, report = (prepared, start(prepared)) if fewer is None else fewer.train(prepared, start)
    if trace is not None:
        output.note(_write_trace(trace, prepared.plan, Path(report.run_dir)))
    times = evaluation_times(Path(report.run_dir), prepared.plan, prepared.workload.graph)
    report = report.model_copy(update={"evaluations": tuple(times)})
    output.report(as_json, report, render_report(report))


def _script_and_plan(given: Path, plan: Path | None, arguments: Sequence[str]) -> tuple[Path | None, Path]:
    """The script, if there is one, and the plan.

    Raises:
        UsageError: a script without a plan, or arguments for no script.
        InputError: the script is not there.
    """
    if plan is None:
        if given.suffix == ".py":
            raise UsageError(
                f"{given}: a script, and no plan to run it by",
                hint=f"spindle launch {given} --plan PLAN.yaml",
            )
        if arguments:
            raise UsageError(
                f"{arguments[0]}: arguments are for a script",
                hint="spindle launch SCRIPT.py ... --plan PLAN.yaml",
            )
        return None, given
    if not given.is_file():
        raise InputError(f"{given}: no such file", hint="With --plan the first argument is a Python script.")
    return given, plan


def _write_trace(path: Path, plan: Plan, run_dir: Path) -> str:
    """Write the run's timeline, where this node has it; gives what is to be said of it."""
    from spindle_cli.launch.watching.trace import write_run_trace

    if write_run_trace(path, plan, run_dir):
        return f"wrote {path}"
    return "the trace is written on node 0, where rank 0 is"


def train(
    prepared: Prepared, *, or_anew: bool, allows_changed_data: bool, hold: Hold, head_start: HeadStart
) -> RunReport:
    """Train to the end, and say on standard error where it begins; `or_anew`: see `run.start_point`."""
    from spindle_cli.launch import run
    from spindle_cli.launch.start_point import describe_folder
    from spindle_cli.plan.unchecked import describe_unchecked

    for warning in run.require_machine(prepared):
        output.note(f"warning: {warning}")
    _say_consent(prepared.plan)
    unchecked = describe_unchecked(prepared.plan.unchecked)
    if unchecked is not None:
        output.note(unchecked)
    begins = run.start_point(prepared, or_anew=or_anew, allows_changed_data=allows_changed_data)
    if begins is None or not begins.is_own:
        for line in prepared.workload.initial:
            output.note(line)
    if begins is not None:
        for skipped in begins.found.skipped:
            output.note(f"warning: {skipped}")
        output.note(describe_folder(begins))
    started = prepared.launch
    steps, workers = counted(prepared.total_steps, "step"), counted(started.processes, "worker")
    output.note(f"training {steps} with {workers} in {started.run_dir}")
    return run.start(prepared, begins, output.err(), output.note, hold, head_start)


def _say_consent(plan: Plan) -> None:
    """That another model is trained than plain PyTorch does, where the workload asks for it."""
    from spindle_cli.plan.islands.said import consent_line

    if (consent := consent_line(plan)) is not None:
        output.note(consent)
