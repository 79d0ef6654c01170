"""`spindle launch` in two steps: prepare everything as data, then start it and watch it to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from rich.console import Console

from spindle_cli.files.request import SeenData
from spindle_cli.files.run_files import forget_metrics_after, has_checkpoints
from spindle_cli.launch.attempts import Attempts, Say
from spindle_cli.launch.build import (
    beginning_from,
    build_launch,
    going_on,
    start_method,
    timed,
    with_datasets,
    worker_environment,
)
from spindle_cli.launch.checks import (
    FoundWorkload,
    chunked_otherwise,
    compiled_otherwise,
    find_workload,
    kept_by_device,
    require_valid,
    sampled_otherwise,
    stepped_by_each,
)
from spindle_cli.launch.choose import choose_run_dir, is_free
from spindle_cli.launch.devices import missing_devices, require_disk, require_open_files, threads_per_worker
from spindle_cli.launch.evaluated_memory import Held, held_for_evaluations, require_room
from spindle_cli.launch.islands import require_with_islands
from spindle_cli.launch.owner import HeldError, Hold, run_of
from spindle_cli.launch.run_dir import discard_unused, forget_errors, hand_on
from spindle_cli.launch.start_point import StartPoint, find_start
from spindle_cli.launch.starting.forked import IMPORTED_LATE
from spindle_cli.launch.starting.head_start import HeadStart
from spindle_cli.launch.starting.network import require_address, share_of_node
from spindle_cli.launch.types import Launch, LaunchOptions, NodeShare
from spindle_cli.launch.watching.run_report import RunReport, report_run
from spindle_cli.launch.watching.signals import heeding_signals
from spindle_cli.plan.file import read_plan
from spindle_cli.plan.types import Plan


@dataclass(frozen=True)
class Prepared:
    """A launch that is ready to start, and what its progress is measured against.

    `total_steps`: at which the run ends. `samples_per_step`: of all tasks together.
    `begun_s`: when the command began, in seconds since the epoch. `run`: of the launch, as in `Owner`.
    `choose`: the run's folder, once more; `launch_in`: the launch in a folder.
    """

    launch: Launch
    share: NodeShare
    plan: Plan
    workload: FoundWorkload
    total_steps: int
    samples_per_step: int
    begun_s: float
    run: str
    choose: Callable[[], Path]
    launch_in: Callable[[Path], Launch]

    @cached_property
    def datasets(self) -> dict[str, SeenData]:
        """What is seen of each task's data now.

        Raises:
            WorkloadError: a dataset is not map-style.
        """
        from spindle_cli.workload.data.seen_data import look_at

        return {task.name: look_at(task) for task in self.workload.graph.workload.tasks}

    @property
    def ranks(self) -> range:
        """The ranks of this node's workers."""
        first = sum(self.plan.whole_cluster.node_sizes[: self.share.rank])
        return range(first, first + self.share.processes)


def prepare(
    plan_path: Path,
    *,
    workload: str | None = None,
    run_dir: Path | None = None,
    node_rank: int | None = None,
    master: str | None = None,
    options: LaunchOptions | None = None,
    begun_s: float | None = None,
    head_start: HeadStart | None = None,
) -> Prepared:
    """Check the plan and its workload, and build the launch of this node. Nothing is written.

    `begun_s`: see `Prepared`; now if None. `head_start`: begun as soon as the plan is known to be valid.

    Raises:
        InputError: the plan is malformed or not valid, or its workload is missing or another.
        UsageError: a run folder that is taken; nodes or master that do not fit the plan's cluster.
    """
    begun_s = time.time() if begun_s is None else begun_s
    asked = options or LaunchOptions()
    plan = read_plan(plan_path)
    require_valid(plan, plan_path)
    share = share_of_node(plan.whole_cluster, node_rank, master)
    run = run_of(plan, share)
    choose = partial(
        choose_run_dir, plan.workload.name, run_dir, resume=asked.resume, node_rank=share.rank, run=run
    )
    chosen = choose()
    threads = threads_per_worker(plan, share.processes)
    if head_start is not None:
        modules = (*IMPORTED_LATE, asked.worker_module) if start_method(plan) == "fork" else ()
        head_start.begin(modules, worker_environment(threads, plan.cluster.talks_by, share))
    goes_on = asked.resume and has_checkpoints(chosen)
    found = find_workload(plan, plan_path, workload, reads_initial=not goes_on)
    steps = asked.steps or found.train.steps
    require_with_islands(plan, asked, steps)
    full = replace(asked, steps=steps, threads=threads)

    def launch_in(folder: Path) -> Launch:
        return build_launch(plan, plan_path, found.source, folder, share, full)

    samples = samples_per_step(plan)
    return Prepared(launch_in(chosen), share, plan, found, steps, samples, begun_s, run, choose, launch_in)


def samples_per_step(plan: Plan) -> int:
    """Samples of one iteration, all tasks together; on average where not every step runs all."""
    islands = 1 if plan.local_sgd is None else plan.local_sgd.islands
    of_task = {metaop.task: metaop.batch_size * islands for metaop in plan.metaops}
    if not plan.task_sets:
        return sum(of_task.values())
    return round(sum(each.share * sum(of_task[task] for task in each.tasks) for each in plan.task_sets))


def require_machine(prepared: Prepared) -> tuple[str, ...]:
    """Whether this machine can run its part; what it does otherwise than planned, as lines for people.

    Raises:
        InputError: devices, memory, disk or open files are missing; or memory for what is only evaluated.
        UsageError: node 0 cannot listen where the nodes are to meet.
    """
    launch = prepared.launch
    require_open_files(launch.processes, prepared.plan.whole_cluster.num_devices)
    require_address(prepared.share)
    require_disk(launch.run_dir)
    return (
        *missing_devices(prepared.plan, launch.processes, launch.node_rank),
        *compiled_otherwise(prepared.plan, prepared.workload.train),
        *chunked_otherwise(prepared.plan, prepared.workload.train),
        *sampled_otherwise(prepared.plan, prepared.workload),
        *kept_by_device(prepared.workload),
        *stepped_by_each(prepared.plan, prepared.workload),
        *require_room(prepared.plan, _only_evaluated(prepared), str(prepared.launch.request.plan)),
    )


def _only_evaluated(prepared: Prepared) -> Held:
    narrow = prepared.workload.train.precision == "bf16"
    return held_for_evaluations(prepared.plan, prepared.workload.graph, 2 if narrow else None)


def start_point(
    prepared: Prepared, *, or_anew: bool = False, allows_changed_data: bool = False
) -> StartPoint | None:
    """The checkpoint from which the run will go on; see `find_start`."""
    request = prepared.launch.request
    return find_start(
        request,
        prepared.workload,
        prepared.total_steps,
        prepared.datasets,
        or_anew=or_anew,
        allows_changed_data=allows_changed_data,
    )


def start(
    prepared: Prepared,
    begins: StartPoint | None,
    console: Console,
    say: Say,
    hold: Hold,
    head_start: HeadStart | None = None,
) -> RunReport:
    """Run this node's workers to their end, with progress on `console` where it is a terminal.

    `begins`: the checkpoint that they go on from. `say`: takes lines for people. `hold`: on the run's folder,
    which this takes. `head_start`: taken by the first attempt.

    Raises:
        HeldError: another launch has the folder.
        RunFailedError: a worker failed, with that worker's error; or SIGTERM has stopped the run, with the
            exit code STOPPED.
        InputError: the run's folder cannot be written.
        KeyboardInterrupt: after everything that was started has ended.
    """
    progress = (prepared.total_steps, prepared.samples_per_step)
    with heeding_signals() as signals:
        launch = _with_folder(timed(_held(prepared, hold, say), prepared.begun_s), begins, say)
        launch = hand_on(with_datasets(launch, prepared.datasets), prepared.workload.memo)
        signals.pass_on(launch.run_dir)
        attempts = Attempts(launch, prepared.ranks, signals, console, say, progress, hold, head_start)
        try:
            attempts.run()
        except (KeyboardInterrupt, SystemExit):
            if hold.is_new and launch.num_nodes == 1:
                discard_unused(launch.run_dir)
            raise
    return report_run(launch, attempts.steps, prepared.samples_per_step)


def _held(prepared: Prepared, hold: Hold, say: Say) -> Launch:
    """The launch, in a folder that no other launch has: the one that was chosen, or the next where another
    has come first and the user has not named it.

    Raises:
        UsageError: there is a run in the folder that the user has named; HeldError: or one is going on.
    """
    launch, rank = prepared.launch, prepared.share.rank
    while True:
        try:
            hold.take(launch.run_dir, prepared.run, rank)
            if launch.request.resume or is_free(launch.run_dir, prepared.run, rank):
                return launch
            hold.release()
        except HeldError:
            if launch.request.resume:
                raise
        launch = prepared.launch_in(prepared.choose())
        say(f"another run has begun in the folder meanwhile; this one goes to {launch.run_dir}")


def _with_folder(launch: Launch, begins: StartPoint | None, say: Say) -> Launch:
    """Make the run's folder ready to go on in; the launch from where it begins."""
    if launch.request.resume:
        step = begins.found.checkpoint.step if begins is not None and begins.is_own else None
        launch = going_on(launch, step)
        forget_errors(launch.run_dir)
        for problem in forget_metrics_after(launch.run_dir, step or 0):
            say(f"warning: {problem}")
    if begins is not None and not begins.is_own:
        launch = beginning_from(launch, begins.found.checkpoint.step)
    return launch
