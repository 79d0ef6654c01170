"""`spindle launch` in two steps: prepare everything as data, then start it and watch it to its end; and all
of a plan's cluster as processes of this machine, run once, as `verify` does.

To prepare it is to choose a folder in which no run writes over another, and to refuse what does not go with
islands (`train.local_sgd`), or has no room beside the plan for what tasks that are only evaluated hold.
"""

from __future__ import annotations

import glob
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from spindle_cli.errors import InputError, RunFailedError, UsageError
from spindle_cli.files.request import SeenData, workers_dir
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
    AnalysedWorkload,
    chunked_otherwise,
    compiled_otherwise,
    find_workload,
    kept_by_device,
    require_valid,
    sampled_otherwise,
    stepped_by_each,
)
from spindle_cli.launch.devices import (
    devices_here,
    missing_devices,
    require_disk,
    require_open_files,
    threads_per_worker,
)
from spindle_cli.launch.owner import Claim, HeldError, Hold, living_claims, require_open, run_of
from spindle_cli.launch.run_dir import discard_unused, forget_errors, hand_on, has_run, prepare_run_dir
from spindle_cli.launch.start_point import StartPoint, find_start
from spindle_cli.launch.starting.forked import IMPORTED_LATE
from spindle_cli.launch.starting.head_start import HeadStart
from spindle_cli.launch.starting.network import require_address, share_of_node, whole_cluster_here
from spindle_cli.launch.starting.process import run_launch
from spindle_cli.launch.types import Launch, LaunchOptions, NodeShare
from spindle_cli.launch.watching.cause import failure_of, require_done
from spindle_cli.launch.watching.run_report import RunReport, report_run
from spindle_cli.launch.watching.signals import heeding_signals
from spindle_cli.plan.file import read_plan
from spindle_cli.plan.types import Plan
from spindle_cli.program.evaluated import place_evaluated
from spindle_cli.units import format_bytes
from spindle_cli.workload.settings.types import nearest_multiples

if TYPE_CHECKING:
    from torch import Tensor

    from spindle_cli.analysis.memo import AnalysisMemo
    from spindle_cli.workload.graph import WorkloadGraph


def find_planned(plan_path: Path, workload: str | None) -> tuple[Plan, AnalysedWorkload]:
    """Read a plan and analyse its workload; `workload`: where it is, if not where the plan says.

    Raises:
        InputError: the plan is malformed or not valid, or its workload is missing or another.
    """
    plan = read_plan(plan_path)
    require_valid(plan, plan_path)
    return plan, find_workload(plan, plan_path, workload)


def threads_of_all(plan: Plan) -> int:
    """Torch threads of each worker, where all of a plan's workers run here."""
    return threads_per_worker(plan, whole_cluster_here(plan.whole_cluster).processes)


def build_here(plan: Plan, plan_path: Path, source: str, run_dir: Path, options: LaunchOptions) -> Launch:
    """Build the launch of all of a plan's workers on this machine."""
    return build_launch(plan, plan_path, source, run_dir, whole_cluster_here(plan.whole_cluster), options)


def require_room_for_all(
    plan: Plan, workload: AnalysedWorkload, launch: Launch, folder: Path, needed_bytes: int
) -> tuple[str, ...]:
    """Whether this machine can run all workers; what it does otherwise than planned, as lines for people.

    `needed_bytes`: what is written in `folder` beside the run's own files.

    Raises:
        InputError: devices, memory, disk or open files are missing.
    """
    missing = missing_devices(plan, launch.processes, node_rank=None)
    require_open_files(launch.processes, plan.whole_cluster.num_devices)
    require_disk(folder, needed_bytes=needed_bytes)
    return (*missing, *(f"warning: {line}" for line in kept_by_device(workload)))


def run_once(launch: Launch, memo: AnalysisMemo | None = None) -> RunFailedError | None:
    """Run a launch in a new folder to its end, once and unwatched; gives what has failed.

    `memo`: what its workers need not find again.

    Raises:
        InputError: the folder cannot be made or written.
        RunFailedError: a worker has ended before its work was done, or does not move.
    """
    prepare_run_dir(launch.run_dir)
    if launch.request.capture_dir is not None:
        launch.request.capture_dir.mkdir()
    if memo is not None:
        launch = hand_on(launch, memo)
    ending, ranks = run_launch(launch, lambda: None), range(launch.processes)
    if ending.code != 0:
        return failure_of(launch, ending.stuck, code=ending.code, ranks=ranks)
    require_done(launch, ranks)
    return None


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
    workload: AnalysedWorkload
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
        from spindle_cli.training.data.streams import look_at

        return {task.name: look_at(task) for task in self.workload.graph.workload.tasks}

    @property
    def devices_here(self) -> int | None:
        """How many devices of the plan's kind this machine has; None on CPUs: each is only a process."""
        return devices_here(self.plan)

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
    launch_options = options or LaunchOptions()
    plan = read_plan(plan_path)
    require_valid(plan, plan_path)
    share = share_of_node(plan.whole_cluster, node_rank, master)
    run = run_of(plan, share)
    choose = partial(
        choose_run_dir,
        plan.workload.name,
        run_dir,
        resume=launch_options.resume,
        node_rank=share.rank,
        run=run,
    )
    chosen = choose()
    threads = threads_per_worker(plan, share.processes)
    if head_start is not None:
        modules = (*IMPORTED_LATE, launch_options.worker_module) if start_method(plan) == "fork" else ()
        head_start.begin(modules, worker_environment(threads, plan.cluster.talks_by, share))
    goes_on = launch_options.resume and has_checkpoints(chosen)
    found_workload = find_workload(plan, plan_path, workload, reads_initial=not goes_on)
    steps = launch_options.steps or found_workload.train.steps
    require_with_islands(plan, launch_options, steps)
    full = replace(launch_options, steps=steps, threads=threads)

    def launch_in(folder: Path) -> Launch:
        return build_launch(plan, plan_path, found_workload.source, folder, share, full)

    samples = samples_per_step(plan)
    return Prepared(
        launch_in(chosen), share, plan, found_workload, steps, samples, begun_s, run, choose, launch_in
    )


def samples_per_step(plan: Plan) -> int:
    """Samples of one iteration, all tasks together; on average where not every step runs all."""
    islands = 1 if plan.local_sgd is None else plan.local_sgd.islands
    of_task = {metaop.task: metaop.batch_size * islands for metaop in plan.metaops}
    if not plan.task_sets:
        return sum(of_task.values())
    return round(
        sum(task_set.share * sum(of_task[task] for task in task_set.tasks) for task_set in plan.task_sets)
    )


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
        kept = prepared.workload.graph.kept
        attempts = Attempts(launch, prepared.ranks, signals, console, say, progress, hold, head_start, kept)
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
        step = begins.stored.checkpoint.step if begins is not None and begins.is_own else None
        launch = going_on(launch, step)
        forget_errors(launch.run_dir)
        for problem in forget_metrics_after(launch.run_dir, step or 0):
            say(f"warning: {problem}")
    if begins is not None and not begins.is_own:
        launch = beginning_from(launch, begins.stored.checkpoint.step)
    return launch


def require_with_islands(plan: Plan, options: LaunchOptions, steps: int) -> None:
    """Refuse what a plan with islands cannot do.

    Args:
        steps: at which the run is to end.

    Raises:
        UsageError: naming the option, and what goes instead.
    """
    if plan.local_sgd is None:
        return
    every = plan.local_sgd.every
    if steps % every:
        raise UsageError(
            f"--steps {steps}: it ends between two outer steps, of which there is one after every {every} "
            "steps (train.local_sgd): islands have different models there",
            hint=f"Take a multiple of {every}, such as {nearest_multiples(steps, every)}.",
        )
    if options.async_checkpoints:
        raise UsageError(
            "--async-checkpoints: does not go with islands (train.local_sgd), which save one after the other",
            hint="Leave it out: training waits for each checkpoint then.",
        )


Held = Mapping[str, tuple[int, ...]]  # bytes on each device, by task


def held_for_evaluations(plan: Plan, graph: WorkloadGraph, bytes_per_float: int | None = None) -> Held:
    """Parameters and buffers of tasks that are only evaluated, which a run keeps from its beginning to its
    end: those that no op of a trained task uses. What several of them share counts for the first.

    Args:
        bytes_per_float: of all floating-point numbers; None: their own.
    """
    from spindle_cli.analysis.evaluation import names_of_all, needs_of

    if not graph.workload.evaluated:
        return {}
    table = names_of_all(graph)
    counted: set[tuple[int, str]] = set()
    held_by_task: dict[str, tuple[int, ...]] = {}
    for task in graph.workload.evaluated:
        needs, subgraph = needs_of(graph, task.name), graph.only_evaluated(task.name)
        trained = frozenset[str]().union(*needs.held.values())
        held = [0] * plan.cluster.num_devices
        for slice_ in place_evaluated(plan, needs).slices:
            for position in range(*slice_.ops):
                op = subgraph.tasks[task.name].ops[subgraph.by_name[slice_.metaop].ops[position]]
                names = {*table.of_op(task.name, (*op.parameters, *op.buffers))} - trained
                for device, name in ((device, name) for device in slice_.devices for name in sorted(names)):
                    if (device, name) not in counted:
                        counted.add((device, name))
                        held[device] += _num_bytes(table.tensor(name), bytes_per_float)
        held_by_task[task.name] = tuple(held)
    return held_by_task


def require_room(plan: Plan, held: Held, where: str) -> tuple[str, ...]:
    """How much that is, as lines for people. `where`: the plan's file.

    Raises:
        InputError: a device has no memory for it beside what the plan predicts.
    """
    predictions = [task_set.predicted for task_set in plan.task_sets] or [plan.predicted]
    sums = [sum(device_bytes) for device_bytes in zip(*held.values(), strict=True)] if held else []
    for device, more in enumerate(sums):
        planned = max(predicted.peak_memory_bytes[device] for predicted in predictions)
        capacity = plan.cluster.memory_bytes[device]
        if more and planned + more > capacity:
            tasks = ", ".join(task for task, device_bytes in held.items() if device_bytes[device])
            raise InputError(
                f"{where}: device {device} needs {format_bytes(planned)} of its {format_bytes(capacity)} for "
                f"training, and {format_bytes(more)} more for parameters that are only evaluated ({tasks})",
                hint="Plan for more devices, or evaluate these tasks apart from the run.",
            )
    return tuple(
        f"task {task!r}, which is only evaluated, holds {format_bytes(max(device_bytes))} of its own "
        "parameters and buffers on a device, beside what the plan predicts"
        for task, device_bytes in held.items()
        if any(device_bytes)
    )


def _num_bytes(tensor: Tensor, bytes_per_float: int | None) -> int:
    if bytes_per_float is None or not tensor.is_floating_point():
        return tensor.numel() * tensor.element_size()
    return tensor.numel() * bytes_per_float


RUNS = Path("runs")


def choose_run_dir(workload: str, wanted: Path | None, *, resume: bool, node_rank: int, run: str) -> Path:
    """The folder of this node's run; it may not exist yet.

    Without `wanted`: the one that another node of this run has claimed, else the first of runs/<workload>-1,
    -2, ... that is free; to resume, the last one in which this node has a run.

    Args:
        run: of the launch, as in `Owner`.

    Raises:
        UsageError: `wanted` holds something already, or there is no run to resume.
        HeldError: another launch has the folder.
    """
    name = re.sub(r"[^\w.-]+", "-", workload) or "run"
    if resume:
        last_run = wanted or _last_run(name, node_rank)
        if last_run is None or not last_run.is_dir():
            raise UsageError(
                f"--resume: there is no run in {last_run or RUNS / (name + '-*')}",
                hint="Give the folder of the run to resume with --run-dir.",
            )
        require_open(last_run, run, node_rank)
        return last_run
    if wanted is not None:
        if wanted.exists() and not wanted.is_dir():
            raise UsageError(f"--run-dir {wanted}: it is a file, not a folder", hint="Choose another name.")
        require_open(wanted, run, node_rank)
        if not is_free(wanted, run, node_rank):
            raise UsageError(
                f"--run-dir {wanted}: there is a run in it already",
                hint="Choose another folder, or add --resume to go on with that run.",
            )
        return wanted
    joined = [folder for _, folder in _numbered(name) if _is_joined(folder, run, node_rank)]
    if joined:
        return joined[0]
    number = 1
    while not is_free(RUNS / f"{name}-{number}", run, node_rank):
        number += 1
    return RUNS / f"{name}-{number}"


def _numbered(name: str) -> list[tuple[int, Path]]:
    """Return the folders runs/<name>-N, by number."""
    named = ((path.name.removeprefix(f"{name}-"), path) for path in RUNS.glob(f"{glob.escape(name)}-*"))
    return sorted((int(number), path) for number, path in named if number.isdecimal() and path.is_dir())


def _last_run(name: str, node_rank: int) -> Path | None:
    """The one with the largest number: 10 comes after 9."""
    runs = [path for _, path in _numbered(name) if _has_request(path, node_rank) or has_results(path)]
    return runs[-1] if runs else None


def _has_request(run_dir: Path, node_rank: int) -> bool:
    return (workers_dir(run_dir) / f"node-{node_rank}.request.json").exists()


def has_results(run_dir: Path) -> bool:
    """Whether there is anything of a run besides what its launchers and workers say."""
    return any(path != workers_dir(run_dir) for path in run_dir.iterdir())


def is_free(run_dir: Path, run: str, node_rank: int) -> bool:
    """Whether this node may begin a run here: nobody has it, and there is nothing in it but what another node
    of this run has begun.
    """
    if _has_request(run_dir, node_rank):
        return False
    claims = [claim for claim in living_claims(run_dir) if not _is_own(claim)]
    if not all(claim.lets_in(run, node_rank) for claim in claims):
        return False
    return bool(claims) or not has_run(run_dir)


def _is_joined(run_dir: Path, run: str, node_rank: int) -> bool:
    """Whether other nodes of this run are here, and this one is not yet."""
    return bool(living_claims(run_dir)) and is_free(run_dir, run, node_rank)


def _is_own(claim: Claim) -> bool:
    return claim.owner is not None and claim.owner.is_of_this_process
