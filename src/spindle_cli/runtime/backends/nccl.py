"""What a worker asks of CUDA and NCCL where the user does not."""

from __future__ import annotations

from pathlib import Path

from spindle_cli.costs.communicators import MESSAGE_CHANNELS
from spindle_cli.files.request import workers_dir

# Every communicator has a stream of its own, in which a receive may wait long for its sender. Streams beyond
# this number share a hardware queue, and what is behind the waiting one waits with it. CUDA takes 1 to 32,
# and has 8 by itself.
_HARDWARE_QUEUES = "32"
# The last so many operations of each rank are kept for a dump.
_TRACED = "2000"


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
