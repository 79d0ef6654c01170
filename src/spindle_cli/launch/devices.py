"""The devices, memory and disk of this machine against what a launch needs."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import psutil

from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan
from spindle_cli.process.devices import cpu_model, gpu_of, places_on_gpus, usable_cores
from spindle_cli.process.environment import chosen_threads
from spindle_cli.profile.mixed.seen import is_known_as
from spindle_cli.profile.types import Device
from spindle_cli.units import MIB, format_bytes

# A worker process before it holds any tensor: the interpreter and torch's libraries (torch 2.13, CPU build).
WORKER_BYTES = 250 * MIB
# Logs, metrics and request files, with room to spare.
RUN_FILES_BYTES = 64 * MIB
# Open files: libraries, logs and the store; a pipe and a connection to the store for each worker; a worker's
# connections to each other one, of every communicator.
BASE_FILES, FILES_PER_PROCESS, FILES_PER_PEER = 128, 4, 8


def threads_per_worker(plan: Plan, processes: int) -> int:
    """Torch threads of each worker: as OMP_NUM_THREADS says, or as many as the curves were measured with and
    the workers' shares of the cores allow.

    Raises:
        UsageError: OMP_NUM_THREADS is no number of threads.
    """
    share = max(1, usable_cores() // processes)
    return chosen_threads() or min(plan.threads_per_process or share, share)


def devices_here(plan: Plan) -> int | None:
    """How many devices of the plan's kind this machine has; None on CPUs, where each is only a process."""
    if plan.cluster.is_cpu:
        return None
    return places_on_gpus()


def missing_devices(plan: Plan, processes: int, node_rank: int | None = 0) -> tuple[str, ...]:
    """What this node lacks, as lines for people; a CPU plan may have more workers than cores, only slower.

    Args:
        node_rank: None: it runs all of the plan's nodes, whatever their types are.

    Raises:
        InputError: the devices, or the memory for so many workers, are not there, or devices are of another
            type than the plan has on this node, of several.
    """
    if not plan.cluster.is_cpu:
        _require_nccl(plan)
        _require_gpus(plan, processes)
        if node_rank is not None:
            _require_types(plan, processes, node_rank)
        return ()
    _require_memory(processes)
    unlike = None if node_rank is None else _unlike_processor(plan, node_rank)
    cores, threads = usable_cores(), threads_per_worker(plan, processes)
    lines = [] if unlike is None else [unlike]
    if processes * threads > cores:
        threads_note = f" of {threads} threads each" if threads > 1 else ""
        lines.append(
            f"{processes} workers{threads_note} on {cores} cores: they share them, and predicted times hold "
            "only if they were measured so"
        )
    if threads != (plan.threads_per_process or threads):
        lines.append(
            f"workers have {threads} threads each; the plan's times are of {plan.threads_per_process}, and "
            "will be off"
        )
    return tuple(lines)


def _require_nccl(plan: Plan) -> None:
    backend = plan.cluster.talks_by
    if backend != "nccl":
        raise InputError(
            f"the plan's cluster has GPUs ({plan.cluster.device_type}) and `backend: {backend}`, which torch "
            "cannot send tensors of GPUs by",
            hint="Leave `backend` out of the cluster file, or set it to nccl, and plan again.",
        )


def _require_gpus(plan: Plan, processes: int) -> None:
    present = devices_here(plan) or 0
    if present < processes:
        raise InputError(
            f"the plan has {processes} devices ({plan.cluster.device_type}) on this node; found {present}",
            hint="Launch where the devices are, or plan again for the devices at hand.",
        )


def _require_types(plan: Plan, processes: int, node_rank: int) -> None:
    """Require that each device of a cluster of several types is of the type that the plan has it for: each is
    timed for its own, and given as much to do as it can.
    """
    cluster = plan.whole_cluster
    if not cluster.is_mixed:
        return
    import torch

    first = cluster.first_device_of[node_rank]
    for local, wanted in enumerate(cluster.type_of[first : first + processes]):
        here = Device(type="cuda", name=torch.cuda.get_device_name(gpu_of(local)), memory_bytes=0)
        if not is_known_as(here, wanted):
            raise InputError(
                f"device {first + local} of the plan, GPU {local} of this node (rank {node_rank}), is a "
                f"{wanted!r}; found {here.name!r}",
                hint="Launch each node with the rank that it has in the plan's cluster, or plan again for "
                "the devices as they are.",
            )


def _unlike_processor(plan: Plan, node_rank: int) -> str | None:
    """Say what to do where this node's CPU is of none of the types that were measured; None where it is of
    the plan's.

    Raises:
        InputError: it is another one's.
    """
    cluster = plan.whole_cluster
    wanted = cluster.type_of[cluster.first_device_of[node_rank]]
    models, here = plan.profile.processors, cpu_model()
    if wanted not in models or models[wanted] == here:
        return None
    named = f"node {node_rank} of the plan has devices {wanted!r}, measured on {models[wanted]!r}"
    others = [kind for kind, model in models.items() if model == here]
    if others:
        raise InputError(
            f"{named}; this machine is {here!r}, on which {' and '.join(map(repr, others))} was measured",
            hint="Launch each node with the rank that it has in the plan's cluster, or plan again for the "
            "devices as they are.",
        )
    return f"{named}; this machine is {here!r}: predicted times may be off"


def _require_memory(processes: int) -> None:
    total = psutil.virtual_memory().total
    needed = processes * WORKER_BYTES
    if needed > total:
        raise InputError(
            f"the plan has {processes} devices on this node, a worker process each: they need "
            f"{format_bytes(needed)} before they hold any tensor; this machine has {format_bytes(total)}",
            hint="Plan for fewer devices per node.",
        )


def require_open_files(processes: int, world_size: int) -> None:
    """Let this process, and the workers that come of it, open as many files as they need.

    Args:
        processes: of this node. `world_size`: of all nodes; a worker has connections to each other one.

    Raises:
        InputError: they may not.
    """
    needed = BASE_FILES + FILES_PER_PROCESS * processes + FILES_PER_PEER * world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < needed:
        raise InputError(
            f"this process may have {hard} files open; a launcher of {processes} workers, and each of them, "
            f"may need {needed}",
            hint=f"Allow more: `ulimit -n {needed}`, or the limit of your job scheduler or container.",
        )
    if resource.RLIM_INFINITY != soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def require_disk(run_dir: Path, needed_bytes: int = 0) -> None:
    """Refuse to start a run that would fill the disk, or whose folder cannot be made.

    Raises:
        InputError: it cannot; or less is free there than the run's files need.
    """
    existing = run_dir.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "may not be written" if existing.is_dir() else "is a file"
        raise InputError(
            f"{run_dir}: the run's folder cannot be made: {existing} {why}",
            hint="Choose a folder on a disk that can be written, with --run-dir.",
        )
    needed = RUN_FILES_BYTES + needed_bytes
    usage = shutil.disk_usage(existing)
    free = usage.free
    if usage.total and free < needed:  # no disk at all is behind /proc: making the folder will say so
        raise InputError(
            f"{run_dir}: {format_bytes(free)} are free on its disk; the run needs {format_bytes(needed)}",
            hint="Make room, or choose a folder on another disk with --run-dir.",
        )
