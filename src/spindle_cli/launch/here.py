"""All of a plan's cluster as processes of this machine, as `verify` runs it: found, built, and run once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.errors import RunFailedError
from spindle_cli.launch.build import build_launch
from spindle_cli.launch.checks import AnalysedWorkload, find_workload, kept_by_device, require_valid
from spindle_cli.launch.devices import missing_devices, require_disk, require_open_files, threads_per_worker
from spindle_cli.launch.run_dir import hand_on, prepare_run_dir
from spindle_cli.launch.starting.network import whole_cluster_here
from spindle_cli.launch.starting.process import run_launch
from spindle_cli.launch.types import Launch, LaunchOptions
from spindle_cli.launch.watching.cause import failure_of
from spindle_cli.launch.watching.finished import require_done
from spindle_cli.plan.file import read_plan
from spindle_cli.plan.types import Plan

if TYPE_CHECKING:
    from spindle_cli.analysis.memo import AnalysisMemo


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


def require_machine(
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
