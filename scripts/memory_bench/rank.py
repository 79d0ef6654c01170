"""One rank of a training whose memory is measured; it writes its peak as a number to OUT/<rank>.

By a plan (`ours REQUEST.json`), or with DistributedDataParallel (`ddp WORKLOAD.yaml`):

    torchrun ... -m memory_bench.rank ours|ddp SOURCE OUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from runtime_bench import plain_training

from memory_bench.live_bytes import LiveBytes
from spindle_cli.environment import WorkerEnvironment
from spindle_cli.request import RunRequest
from spindle_cli.runtime import training, worker
from spindle_cli.workload.load import load

STEPS = 3


def by_plan(source: Path) -> int:
    """Peak bytes while the plan's worker trains."""
    train = training.Trainer.train
    peak = 0

    def measured(self: training.Trainer, steps: range) -> None:
        nonlocal peak
        model = self.model
        pieces = [piece.tensor for piece in self.pool.pieces]
        held = [*model.parameters.values(), *model.buffers.values(), *pieces]
        gradients = [tensor.grad for tensor in held if tensor.grad is not None]
        with LiveBytes([*held, *gradients]) as live:
            train(self, steps)
        peak = live.peak

    with mock.patch.object(training.Trainer, "train", measured):
        worker.run(RunRequest.read(source), WorkerEnvironment.read())
    return peak


def by_ddp(source: str) -> int:
    """Peak bytes of plain training."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loaded = load(source)
    modules = [plain_training.module_of(task) for task in loaded.workload.tasks]
    held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    with mock.patch.object(plain_training, "load", lambda _: loaded), LiveBytes(held) as live:
        plain_training.train(source, "ddp", STEPS)
    dist.barrier()
    dist.destroy_process_group()
    return live.peak


def main() -> None:
    """Entry point of a rank."""
    how, source, out = sys.argv[1:]
    peak = by_plan(Path(source)) if how == "ours" else by_ddp(source)
    (Path(out) / str(WorkerEnvironment.read().rank)).write_text(str(peak), encoding="utf-8")


if __name__ == "__main__":
    main()
