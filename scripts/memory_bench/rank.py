"""One rank of trainings whose memory is measured; it writes their peaks as numbers.

By plans, one after the other (`ours FOLDER`: FOLDER/*/request.json; FOLDER/*/peak.<rank>), or with
DistributedDataParallel (`ddp WORKLOAD.yaml OUT`: OUT/peak.<rank>):

    python -m spindle_cli.launch.starting.torchrun ... \
        -m memory_bench.rank ours FOLDER | ddp WORKLOAD.yaml OUT
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from runtime_bench import plain_training
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from spindle_cli.files.request import RunRequest
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.profile.op.op_memory import LiveBytes
from spindle_cli.runtime import training
from spindle_cli.runtime.communication import flat_bucket, pass_bucket
from spindle_cli.runtime.connecting import connected
from spindle_cli.runtime.memory.given_up import give_up_memory, take_back_memory
from spindle_cli.runtime.results import Step
from spindle_cli.runtime.step.data import Feed
from spindle_cli.runtime.worker import train_plan
from spindle_cli.workload.building.load import load

STEPS = 3


def by_plans(folder: Path) -> None:
    """Train by each plan, and write the peak bytes of it."""
    paths = sorted(folder.glob("*/request.json"))
    environment, device = WorkerEnvironment.read(), torch.device("cpu")
    torch.set_num_threads(1)
    with connected(RunRequest.read(paths[0]), environment, device):
        for path in paths:
            peak = by_plan(RunRequest.read(path), environment, device)
            write_peak(path.parent, environment.rank, peak)
            gc.collect()


def by_plan(request: RunRequest, environment: WorkerEnvironment, device: torch.device) -> float:
    """Peak bytes while the plan's worker trains."""
    run = training.Training.run
    peak = 0.0

    def measured(self: training.Training) -> Iterator[Step]:
        nonlocal peak
        model = self.model
        pieces = [piece.tensor for piece in self.pool.owned_ranges]
        masters = [] if self.masters is None else [piece.tensor for piece in self.masters.owned_ranges]
        held = [*model.parameters.values(), *model.buffers.values(), *pieces, *masters]
        if self.pool.gather_memory is not None:
            held.append(self.pool.gather_memory.flat)
        gradients = [tensor.grad for tensor in held if tensor.grad is not None]
        with LiveBytes([*held, *gradients]) as live, noting_what_is_given_up(live):
            yield from run(self)
        peak = live.peak

    fetch = Feed._fetch_up_to

    def unseen(self: Feed, number: int) -> None:
        # What a dataset keeps in memory is not the device's; a batch is seen where it is used.
        with _disable_current_modes():
            fetch(self, number)

    with (
        mock.patch.object(training.Training, "run", measured),
        mock.patch.object(Feed, "_fetch_up_to", unseen),
    ):
        train_plan(request, environment, device)
    return peak


@contextmanager
def noting_what_is_given_up(live: LiveBytes) -> Iterator[None]:
    """Inside, what passes gather and give up again counts while it is there."""

    def noted(change: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def both(flat: Tensor) -> None:
            change(flat)
            live.resized(flat)

        return both

    with ExitStack() as patched:
        for module in (flat_bucket, pass_bucket):
            patched.enter_context(mock.patch.object(module, "give_up_memory", noted(give_up_memory)))
            patched.enter_context(mock.patch.object(module, "take_back_memory", noted(take_back_memory)))
        yield


def by_ddp(source: str, out: Path) -> float:
    """Peak bytes of plain training; `out`: a folder for what it leaves."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loaded = load(source)
    modules = [plain_training.module_of(task) for task in loaded.workload.tasks]
    held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    with mock.patch.object(plain_training, "load", lambda _: loaded), LiveBytes(held) as live:
        plain_training.train(source, "ddp", STEPS, plain_training.begun_path(out / "steps"))
    dist.barrier()
    dist.destroy_process_group()
    peak: float = live.peak
    return peak


def write_peak(folder: Path, rank: int, peak: float) -> None:
    """Keep a rank's peak."""
    (folder / f"peak.{rank}").write_text(str(round(peak)), encoding="utf-8")


def read_peaks(folder: Path, num_ranks: int) -> tuple[int, ...]:
    """What the ranks have written."""
    return tuple(int((folder / f"peak.{rank}").read_text(encoding="utf-8")) for rank in range(num_ranks))


def main(argv: list[str]) -> None:
    """Entry point of a rank."""
    how, source, *out = argv[1:]
    if how == "ours":
        by_plans(Path(source))
    else:
        write_peak(Path(out[0]), WorkerEnvironment.read().rank, by_ddp(source, Path(out[0])))


if __name__ == "__main__":
    main(sys.argv)
