"""A worker that trains nothing: it meets the others, writes metrics, and does one bad thing that workers do.

`python -m fake_worker REQUEST.json` under torchrun; `request.workload` is its orders: 'train' or 'DEED:RANK'.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from spindle_cli.files.request import RunRequest
from spindle_cli.files.run_files import METRICS_FILE, StepMetrics
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.process.worker_session import worker_session

STEP_S = 0.02


def train(request: RunRequest, me: WorkerEnvironment, deed: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    # Who comes late has not hung.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=request.timeout_s))
    command = " ".join(psutil.Process().cmdline())
    (request.run_dir / "workers" / f"pid-{me.rank}").write_text(str(os.getpid()))
    (request.run_dir / "workers" / f"command-{me.rank}").write_text(command)
    with (request.run_dir / METRICS_FILE).open("a") as file:
        for step in range(1, (request.steps or 1) + 1):
            if step == 2:
                misbehave(deed)
            total = torch.ones(1)
            dist.all_reduce(total)
            time.sleep(STEP_S)
            if me.rank == 0:
                metrics = StepMetrics(step=step, loss=1 / step, task_losses={}, iteration_s=STEP_S)
                file.write(metrics.to_line())
                file.flush()
    print(f"rank {me.rank} of {me.world_size} done")
    dist.destroy_process_group()


def misbehave(deed: str) -> None:
    if deed == "raise":
        raise ValueError("the worker's own error")
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)


def main(argv: list[str]) -> None:
    request = RunRequest.read(Path(argv[1]))
    deed, _, rank = request.workload.partition(":")
    me = WorkerEnvironment.read()
    with worker_session(request.run_dir, me.rank):
        train(request, me, deed if rank == str(me.rank) else "train")


if __name__ == "__main__":
    main(sys.argv)
