"""Processor seconds that the runtime takes of a device for each step and for each slice that it runs: of
steps of a toy, those of plain PyTorch taken off.

Two plans for one device train the same layers: as one slice, and each layer as a slice of its own. Their
difference is what slices take; what a step of one slice takes more than one of plain PyTorch, but for the
slice, is the step's. Each process trains by one of them, alone, while the others do: as a device of a run.
Messages and sums are not in it, as links are measured for these.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed import HashStore  # type: ignore[attr-defined]  # documented, not in __all__

from spindle_cli.errors import RunFailedError
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.files.request import RunRequest
from spindle_cli.overhead import toy
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.process.devices import may_fork
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.profile.profiling import Audience, estimate_profile
from spindle_cli.profile.types import RuntimeOverhead
from spindle_cli.runtime.trainer import Trainer
from spindle_cli.workload.types import Workload

# The first steps fill caches and allocators.
_WARM_UP_STEPS, _STEPS = 10, 60
_ONE_DEVICE = Cluster(
    name="one",
    nodes=(NodeGroup(devices=1, device="cpu", memory_gib=1.0),),
    links=Links(
        intra_node=Link(latency_us=1, bandwidth_gb_per_s=1),
        inter_node=Link(latency_us=1, bandwidth_gb_per_s=1),
    ),
)
_ALONE = WorkerEnvironment(0, 0, 1, 1, "127.0.0.1", 0)
_TOYS: tuple[Callable[[], Workload], ...] = (toy.one_slice, toy.slice_per_layer)


def measure_overhead(processes: int, threads: int) -> RuntimeOverhead:
    """Train both toys in so many processes at once, two at least, one toy in each.

    Args:
        threads: of each process, as a device of a run has them.

    Raises:
        RunFailedError: a process died.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        for build in _TOYS:
            _plan(build, folder)
        return overhead_of(_beside_plain_s(max(processes, len(_TOYS)), threads, folder))


def overhead_of(seconds: Sequence[float]) -> RuntimeOverhead:
    """Tell steps from slices. Noise is no gain: neither is less than nothing.

    Args:
        seconds: that a step of a toy takes more than plain PyTorch, by rank; those of even rank train it as
            one slice, the others as a slice for each layer.
    """
    one_s, apart_s = (median(seconds[number :: len(_TOYS)]) for number in range(len(_TOYS)))
    pass_s = max(apart_s - one_s, 0.0) / (toy.NUM_LAYERS - 1)
    return RuntimeOverhead(step_s=max(one_s - pass_s, 0.0), pass_s=pass_s)


def _plan(build: Callable[[], Workload], folder: Path) -> None:
    """Write a plan of a toy for one device."""
    audience = Audience(Console(quiet=True), note=lambda _: None)
    profile = estimate_profile(
        _source(build), folder / f"{build.__name__}.json", audience, cluster=_ONE_DEVICE, check=False
    )
    write_plan(_plan_file(folder, build), make_plan(profile, _ONE_DEVICE, "sequential"))


def _beside_plain_s(processes: int, threads: int, folder: Path) -> list[float]:
    """Seconds that a step of a toy takes more than plain PyTorch in each of some processes."""
    # With several threads this process has a pool of them, which a fork would wait for.
    context: Any = multiprocessing.get_context("fork" if threads == 1 and may_fork() else "spawn")
    trainings, pipes = [], []
    try:
        for rank in range(processes):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, threads, folder, theirs)
            trainings.append(context.Process(target=_train, args=arguments, daemon=True))
            trainings[-1].start()
            theirs.close()
            pipes.append(ours)
        return [pipe.recv() for pipe in pipes]
    except EOFError as error:
        raise RunFailedError(
            "a process that measures what the runtime takes has died",
            hint="Its error is above. If there is none, it may have run out of memory.",
        ) from error
    finally:
        for training in trainings:
            training.kill()
            training.join()


def _train(rank: int, threads: int, folder: Path, pipe: Connection) -> None:
    """In a process of its own, train a toy as planned and plainly; tell how much longer its steps take."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    planned_s = _step_s(_planned(folder, _TOYS[rank % len(_TOYS)], rank))
    dist.destroy_process_group()
    pipe.send(planned_s - _step_s(_plain()))


def _step_s(training: Iterator[object]) -> float:
    """Median of the processor seconds of a step, all threads of this process together."""
    seconds = []
    for _ in range(_WARM_UP_STEPS + _STEPS):
        begin_s = time.process_time()
        next(training)
        seconds.append(time.process_time() - begin_s)
    next(training, None)  # a run ends behind its last step
    return median(seconds[_WARM_UP_STEPS:])


def _planned(folder: Path, build: Callable[[], Workload], rank: int) -> Iterator[object]:
    """Train a toy as planned; yields behind every step."""
    run_dir = folder / f"{build.__name__}-{rank}"
    run_dir.mkdir()
    request = RunRequest(
        plan=_plan_file(folder, build),
        workload=_source(build),
        steps=_WARM_UP_STEPS + _STEPS,
        run_dir=run_dir,
    )
    with Trainer.of_connected(request, _ALONE, torch.device("cpu")) as trainer:
        yield from trainer


def _plain() -> Iterator[object]:
    """Train the toy on one batch by plain PyTorch, without end; yields behind every step."""
    model, samples = toy.all_equal(), toy.Numbers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.stack([samples[index]["x"] for index in range(toy.BATCH)])
    while True:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        yield optimizer


def _source(build: Callable[[], Workload]) -> str:
    return f"{build.__module__}:{build.__name__}"


def _plan_file(folder: Path, build: Callable[[], Workload]) -> Path:
    return folder / f"{build.__name__}.yaml"
