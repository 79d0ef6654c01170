"""How a worker gets its device, and joins the world of all workers, with what it asks of CUDA and NCCL where
the user does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from spindle_cli.costs.links import MESSAGE_CHANNELS
from spindle_cli.errors import InputError
from spindle_cli.files.request import RunRequest, workers_dir
from spindle_cli.process.devices import give_back_freed_memory, gpu_of, places_on_gpus, sharing_settings
from spindle_cli.process.environment import (
    WorkerEnvironment,
    join_environment,
    set_unless_chosen,
    without_ranks,
)
from spindle_cli.runtime.backends.strict_backend import STRICT_BACKENDS, register_strict_backends
from spindle_cli.runtime.islands.island import Island
from spindle_cli.runtime.islands.peer_replicas import PeerReplicas
from spindle_cli.workload.one_process import show_one_process

# Every communicator has a stream of its own, in which a receive may wait long for its sender. Streams beyond
# this number share a hardware queue, and what is behind the waiting one waits with it. CUDA takes 1 to 32,
# and has 8 by itself.
_HARDWARE_QUEUES = "32"
# The last so many operations of each rank are kept for a dump.
_TRACED = "2000"


def settle_process(request: RunRequest, environment: WorkerEnvironment) -> None:
    """Make this process what a request says of it, before it joins the others."""
    torch.set_num_threads(request.threads)
    give_back_freed_memory()  # until it trains
    if request.backend == "nccl":
        set_unless_chosen(nccl_settings(request.run_dir))
        join_environment(sharing_settings(environment.rank))


def select_device(request: RunRequest, environment: WorkerEnvironment) -> torch.device:
    """This worker's device; of a node's CUDA devices, the one of its local rank (`process/devices.py`).

    Raises:
        InputError: there is no such CUDA device.
    """
    if request.device_type != "cuda":
        return torch.device(request.device_type)
    gpus = places_on_gpus()
    if environment.local_rank >= gpus:
        raise InputError(
            f"the plan's cluster has {environment.local_world_size} devices on this node, "
            f"but torch finds {gpus}",
            hint="Plan for a cluster with as many devices per node as there are.",
        )
    device = torch.device("cuda", gpu_of(environment.local_rank))
    torch.cuda.set_device(device)
    return device


@contextmanager
def connected(
    request: RunRequest, environment: WorkerEnvironment, device: torch.device, island: Island | None = None
) -> Iterator[PeerReplicas | None]:
    """Membership in the world of all workers; where they are islands, in that of one's own, with the
    peer replicas on the others. Code that is not ours sees one process (workload/one_process.py).
    """
    show_one_process()
    backend = environment.backend or request.backend
    if backend in STRICT_BACKENDS:
        register_strict_backends()
    if island is not None:
        yield from _on_island(request, environment, device, island, backend)
        return
    dist.init_process_group(
        backend,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=request.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    with without_ranks():
        yield None
    dist.destroy_process_group()  # not after an error: it would wait for peers that may be gone


def _on_island(
    request: RunRequest, environment: WorkerEnvironment, device: torch.device, island: Island, backend: str
) -> Iterator[PeerReplicas]:
    """All workers meet in one store; each island is a world by itself in it."""
    timeout = timedelta(seconds=request.timeout_s)
    rank, world_size = environment.rank, environment.world_size
    store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
    dist.init_process_group(
        backend,
        store=PrefixStore(f"island-{island.number}", store),
        rank=island.rank,
        world_size=island.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    with without_ranks():
        yield PeerReplicas(island, store, request.timeout_s)
    dist.destroy_process_group()


def nccl_settings(run_dir: Path) -> dict[str, str]:
    """Environment variables, to be set before CUDA and torch's process groups are in use.

    When an operation times out, torch's watchdog writes what every communicator of the rank had under way
    (the 'flight recorder', read by `torchfrtrace`) beside the worker's log.
    """
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": _HARDWARE_QUEUES,
        "NCCL_MAX_P2P_NCHANNELS": str(MESSAGE_CHANNELS),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": _TRACED,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(workers_dir(run_dir) / "nccl-rank-"),
    }
