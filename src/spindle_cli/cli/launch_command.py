"""`spindle launch`: it trains, and reports how the run went, with how long its evaluations took against what
was predicted.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.cli import output
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
from spindle_cli.files.runs.records import Evaluation, EvaluationTimes, read_evaluations
from spindle_cli.plan.types import Plan
from spindle_cli.process.lifetime import ending_at_once
from spindle_cli.units import counted

if TYPE_CHECKING:
    from spindle_cli.elastic.run import Elastic
    from spindle_cli.launch.owner import Hold
    from spindle_cli.launch.run import Prepared
    from spindle_cli.launch.starting.head_start import HeadStart
    from spindle_cli.launch.types import LaunchOptions
    from spindle_cli.launch.watching.run_report import RunReport
    from spindle_cli.plan.types import Plan
    from spindle_cli.workload.graph import WorkloadGraph


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
    from spindle_cli.launch.types import LaunchOptions

    script, plan = _script_and_plan(plan, plan_of_script, script_args or [])
    _require_checkpoints(checkpoint_every, async_checkpoints, resume, allow_changed_data)
    fewer = _FewerDevices.asked_for(elastic, nproc, profile)
    if trace is not None:
        _require_trace_file(trace, plan, script)
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
    order = _Order(plan, options, workload, run_dir, node_rank, master, begun_s)
    if dry_run:
        _show(order, fewer, as_json)
    else:
        _report(*_train(order, fewer, allow_changed_data), trace, as_json)


@dataclass(frozen=True)
class _Order:
    """What the command line says of a launch, whichever plan it goes by in the end.

    `plan`: the first one. `begun_s`: when the command began.
    """

    plan: Path
    options: LaunchOptions
    workload: str | None
    run_dir: Path | None
    node_rank: int | None
    master: str | None
    begun_s: float

    def prepare(
        self, hold: Hold, path: Path, goes_on: bool = False, head_start: HeadStart | None = None
    ) -> Prepared:
        """Check a plan and build its launch. `goes_on`: with the run in the folder of `hold`."""
        from spindle_cli.launch import run

        return run.prepare(
            path,
            workload=self.workload,
            run_dir=hold.run_dir if goes_on else self.run_dir,
            node_rank=self.node_rank,
            master=self.master,
            options=replace(self.options, resume=self.options.resume or goes_on),
            begun_s=None if goes_on else self.begun_s,
            head_start=head_start,
        )


@dataclass(frozen=True)
class _FewerDevices:
    """What is said with --elastic: how many devices to begin with, and where the plan's profile is."""

    num_devices: int | None
    profile: Path | None

    @classmethod
    def asked_for(cls, elastic: bool, num_devices: int | None, profile: Path | None) -> _FewerDevices | None:
        """Gives what the options for fewer devices say; None without --elastic.

        Raises:
            UsageError: what is for --elastic is given without it.
        """
        if elastic:
            return cls(num_devices, profile)
        if num_devices is not None or profile is not None:
            raise UsageError("--nproc and --profile are for --elastic")
        return None

    def begin(self, order: _Order, hold: Hold, prepared: Prepared) -> tuple[Elastic, Prepared]:
        """The run on the devices that it begins with, and what plans again for fewer."""
        from spindle_cli.elastic.run import Elastic  # with the planner, which no other launch needs

        elastic = Elastic.of(prepared, order.plan, self.profile, partial(order.prepare, hold), output.note)
        return elastic, elastic.begin(prepared, self.num_devices)


def _show(order: _Order, fewer: _FewerDevices | None, as_json: bool) -> None:
    """Print the launch, as --dry-run does, and start nothing."""
    from spindle_cli.launch.owner import Hold

    with ending_at_once(signal.SIGINT, signal.SIGTERM), Hold() as hold:
        prepared = order.prepare(hold, order.plan)
        if fewer is not None:
            _, prepared = fewer.begin(order, hold, prepared)
        _say_consent(prepared.plan)
        output.report(as_json, prepared.launch, prepared.launch.shell_script())


def _train(
    order: _Order, fewer: _FewerDevices | None, allows_changed_data: bool
) -> tuple[Prepared, RunReport]:
    """Train to the end, on fewer devices where some are lost for good and that is asked for; gives the run as
    it was when it ended, too.
    """
    from spindle_cli.launch.owner import Hold
    from spindle_cli.launch.starting.head_start import HeadStart

    with ending_at_once(signal.SIGINT, signal.SIGTERM), HeadStart() as head_start, Hold() as hold:
        prepared = order.prepare(hold, order.plan, head_start=head_start)
        elastic = None
        if fewer is not None:
            elastic, prepared = fewer.begin(order, hold, prepared)
        start = partial(
            train,
            or_anew=elastic is not None and not order.options.resume,
            allows_changed_data=allows_changed_data,
            hold=hold,
            head_start=head_start,
        )
        return (prepared, start(prepared)) if elastic is None else elastic.train(prepared, start)


def _report(prepared: Prepared, report: RunReport, trace: Path | None, as_json: bool) -> None:
    """Write the trace that is asked for, and print how the run went."""
    from spindle_cli.launch.watching.run_report import render_report

    if trace is not None:
        output.note(_write_trace(trace, prepared.plan, Path(report.run_dir)))
    times = evaluation_times(Path(report.run_dir), prepared.plan, prepared.workload.graph)
    report = report.model_copy(update={"evaluations": tuple(times)})
    output.report(as_json, report, render_report(report))


def _require_checkpoints(every: int | None, in_background: bool, resume: bool, other_data: bool) -> None:
    """Raises: UsageError: an option is about checkpoints, and none are written or read."""
    if in_background and every is None:
        raise UsageError("--async-checkpoints is for --checkpoint-every")
    if other_data and not resume:
        raise UsageError("--allow-changed-data is for --resume")


def _require_trace_file(trace: Path, plan: Path, script: Path | None) -> None:
    """Raises: InputError, UsageError: the trace cannot be written there, or would replace something else."""
    from spindle_cli.files.writing import require_no_input, require_no_other
    from spindle_cli.launch.watching.run_report import require_writable

    require_no_input("--trace", trace, plan, *([] if script is None else [script]))
    require_no_other("--trace", trace)
    require_writable(trace)


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
    from spindle_cli.launch.watching.run_report import write_run_trace

    if write_run_trace(path, plan, run_dir):
        return f"wrote {path}"
    return "the trace is written on node 0, where rank 0 is"


def train(
    prepared: Prepared, *, or_anew: bool, allows_changed_data: bool, hold: Hold, head_start: HeadStart
) -> RunReport:
    """Train to the end, and say on standard error where it begins; `or_anew`: see `run.start_point`."""
    from spindle_cli.launch import run
    from spindle_cli.plan.plan_report import describe_unchecked

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
        for skipped in begins.stored.skipped:
            output.note(f"warning: {skipped}")
        output.note(begins.describe())
    started = prepared.launch
    steps, workers = counted(prepared.total_steps, "step"), counted(started.processes, "worker")
    output.note(f"training {steps} with {workers} in {started.run_dir}")
    return run.start(prepared, begins, output.err(), output.note, hold, head_start)


def _say_consent(plan: Plan) -> None:
    """That another model is trained than plain PyTorch does, where the workload asks for it."""
    from spindle_cli.plan.islands.said import consent_line

    if (consent := consent_line(plan)) is not None:
        output.note(consent)


def evaluation_times(run_dir: Path, plan: Plan, graph: WorkloadGraph) -> Iterator[EvaluationTimes]:
    """Predict and measure the evaluation of each task that was evaluated, on as many samples as the last
    time.

    Raises:
        InputError: the run's evaluations.jsonl cannot be read.
    """
    from spindle_cli.simulate.run import evaluation_s, has_times

    by_task: dict[str, list[Evaluation]] = {}
    for line in read_evaluations(run_dir):
        by_task.setdefault(line.task, []).append(line)
    for task, lines in by_task.items():
        num_samples = lines[-1].num_samples
        measured = [line.seconds for line in lines if line.num_samples == num_samples]
        if task not in graph.tasks and task not in graph.evaluations:
            continue  # of the workload as it was, before the run was gone on with
        task_plan = _plan_of(task, plan, graph)
        yield EvaluationTimes(
            task=task,
            num_samples=num_samples,
            times=len(measured),
            predicted_s=evaluation_s(task_plan, task, num_samples) if has_times(task_plan, task) else None,
            measured_s=statistics.median(measured),
        )


def _plan_of(task: str, plan: Plan, graph: WorkloadGraph) -> Plan:
    """Gives the plan by which a task is evaluated."""
    if task in graph.tasks:
        return plan
    from spindle_cli.analysis.evaluation import needs_of
    from spindle_cli.program.evaluated import place_evaluated

    return place_evaluated(plan, needs_of(graph, task))
