"""One rank that trains by a plan, and how much of its device that takes at its fullest.

    python -m gpu_bench.rank REQUEST.json

Writes peak.0 beside the request, in bytes. On a GPU: what the allocator has reserved, and what is taken
beside it: context, libraries, communicators. On a CPU: live tensors, which is what a plan counts there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from memory_bench.rank import by_plan, write_peak

from spindle_cli.files.request import RunRequest
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.runtime.connecting import connected, select_device, settle_process
from spindle_cli.runtime.worker import train_plan


def main() -> None:
    """Train, and write the peak."""
    path = Path(sys.argv[1])
    request, environment = RunRequest.read(path), WorkerEnvironment.read()
    settle_process(request, environment)
    device = select_device(request, environment)
    with connected(request, environment, device):
        if device.type == "cuda":
            train_plan(request, environment, device)
            peak = peak_of_gpu(device)
        else:
            torch.set_num_threads(1)
            peak = by_plan(request, environment, device)
    write_peak(path.parent, environment.rank, peak)


def peak_of_gpu(device: torch.device) -> float:
    """Bytes: the most that the allocator has had, and what the driver shows beyond what it has now."""
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    return torch.cuda.max_memory_reserved(device) + outside


if __name__ == "__main__":
    main()
