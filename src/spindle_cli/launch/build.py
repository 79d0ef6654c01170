"""From a plan and what the user asks to the exact command of one node; nothing is written or
started.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from spindle_cli.checkpoint.files import locate_checkpoint, require_folder
from spindle_cli.files.cluster import Backend
from spindle_cli.files.request import TIMELINE_STEPS, RunRequest, SeenData, workers_dir
from spindle_cli.launch.types import Launch, LaunchOptions, NodeShare
from spindle_cli.plan.types import Plan
from spindle_cli.process.environment import is_chosen

# Seconds that a worker has to end by itself once it is asked to; after that it is killed.
SHUTDOWN_S = 3
# Seconds that starting the workers may take longer on one node than on another.
START_S = 60
TORCHRUN = "spindle_cli.launch.starting.torchrun"
# What torch's allocator reads, the newest name first.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# Freed blocks of another size are used for the next ones, as pages: what a plan has nearly filled has no room
# for holes between segments.
_SEGMENTS_GROW = "expandable_segments:True"
# A rank whose operation fails or times out ends, with all that waits for it; so torchrun has it by itself.
_ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def build_launch(
    plan: Plan, plan_path: Path, workload: str, run_dir: Path, share: NodeShare, options: LaunchOptions
) -> Launch:
    """The launch of one node. Paths in the result are absolute."""
    run_dir = run_dir.absolute()
    begin_from, begin_step = None, None
    if options.begin_from is not None:
        begin_from, begin_step = locate_checkpoint(options.begin_from.absolute())
        require_folder(begin_from)
    request = RunRequest(
        plan=plan_path.absolute(),
        workload=workload,
        steps=options.steps,
        run_dir=run_dir,
        resume=options.resume,
        begin_from=begin_from,
        begin_step=begin_step,
        checkpoint_every=options.checkpoint_every,
        keep=options.keep,
        async_checkpoints=options.async_checkpoints,
        device_type="cpu" if plan.cluster.is_cpu else "cuda",
        backend=plan.cluster.talks_by,
        threads=options.threads,
        timeout_s=options.timeout_s,
        dtype=options.dtype,
        no_randomness=options.no_randomness,
        timeline_steps=options.traced_steps or TIMELINE_STEPS,
        traces=options.traced_steps is not None,
        islands=1 if plan.local_sgd is None else plan.local_sgd.islands,
        outer_every=options.outer_every,
        script=None if options.script is None else options.script.absolute(),
        script_args=options.script_args,
        capture_dir=options.capture_dir,
    )
    folder = workers_dir(run_dir)
    request_file = folder / f"node-{share.rank}.request.json"
    exits_file = folder / f"node-{share.rank}.exits.json"
    return Launch(
        num_nodes=share.num_nodes,
        node_rank=share.rank,
        processes=share.processes,
        run_dir=run_dir,
        request_file=request_file,
        request=request,
        environment=worker_environment(options.threads, request.backend, share),
        argv=_argv(share, start_method(plan), options.worker_module, request_file, exits_file),
        log=folder / f"node-{share.rank}.log",
        exits_file=exits_file,
        restarts=options.restarts,
    )


def going_on(launch: Launch, step: int | None) -> Launch:
    """Let a launch go on from the checkpoint after `step`; None: let it begin anew."""
    update = {"resume": step is not None, "resume_step": step}
    return launch.model_copy(update={"request": launch.request.model_copy(update=update)})


def timed(launch: Launch, begun_s: float) -> Launch:
    """Note in a launch that it began at `begun_s` and starts its workers now."""
    update = {"begun_s": begun_s, "started_s": time.time()}
    return launch.model_copy(update={"request": launch.request.model_copy(update=update)})


def with_datasets(launch: Launch, datasets: Mapping[str, SeenData]) -> Launch:
    """Let a launch's workers note in its checkpoints what was seen of the data."""
    request = launch.request.model_copy(update={"datasets": dict(datasets)})
    return launch.model_copy(update={"request": request})


def beginning_from(launch: Launch, step: int) -> Launch:
    """Let a launch begin from the other run's checkpoint after `step`."""
    request = launch.request.model_copy(update={"resume": False, "begin_step": step})
    return launch.model_copy(update={"request": request})


def build_again(launch: Launch, step: int | None) -> Launch:
    """Build a launch once more after a worker was lost. Other nodes notice the loss later, within the run's
    timeout: so long they are waited for, and as long again as it takes to start.

    `step`: see `going_on`.
    """
    before = f"--rdzv-conf=rank={launch.node_rank}"
    wait_s = math.ceil(launch.request.timeout_s + START_S)
    argv = tuple(f"{before},join_timeout={wait_s}" if word == before else word for word in launch.argv)
    # What the launcher has found of the workload is old by now: the user may have changed it.
    request = launch.request.model_copy(update={"memo": None})
    return timed(going_on(launch.model_copy(update={"argv": argv, "request": request}), step), time.time())


def worker_environment(threads: int, backend: Backend, share: NodeShare) -> dict[str, str]:
    """The variables that a node's workers have beyond the launcher's own."""
    additions = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": share.interface}
    if backend != "nccl":
        return additions
    if not is_chosen("NCCL_SOCKET_IFNAME"):
        additions["NCCL_SOCKET_IFNAME"] = f"={share.interface}"  # without the sign, all that begin so
    if not any(map(is_chosen, _ALLOCATOR)):
        additions[_ALLOCATOR[0]] = _SEGMENTS_GROW
    if not is_chosen(_ASYNC_ERRORS):
        additions[_ASYNC_ERRORS] = "1"
    return additions


def start_method(plan: Plan) -> Literal["fork", "spawn"]:
    """How workers come to be. CUDA does not survive a fork, nor do system libraries but on Linux."""
    return "fork" if plan.cluster.is_cpu and sys.platform == "linux" else "spawn"


def _argv(
    share: NodeShare, method: str, worker_module: str, request_file: Path, exits_file: Path
) -> tuple[str, ...]:
    return (
        sys.executable,
        "-m",
        TORCHRUN,
        str(exits_file),
        f"--nnodes={share.num_nodes}",
        f"--nproc-per-node={share.processes}",
        "--rdzv-backend=spindle",
        f"--rdzv-endpoint={share.master}",
        f"--rdzv-conf=rank={share.rank}",
        "--max-restarts=0",
        f"--start-method={method}",
        "-m",
        worker_module,
        str(request_file),
    )
