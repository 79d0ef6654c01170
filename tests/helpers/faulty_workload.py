"""The toy workload, in whose workers something goes wrong at a chosen moment.

What, is in the file that the environment variable `SPINDLE_TEST_FAULTS` names: a list of `Fault`s as JSON,
each of which happens once, whatever number of processes reads it. The package under test knows nothing of
it: layers are the workload's own, and of others' code only torch's collectives and `os.fsync` are wrapped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from helpers import toy_workload
from helpers.toy_workload import Block, Head
from spindle_cli.files.request import STOP_FILE
from spindle_cli.workload.types import Workload

# How gradients may be summed; the toy plan sends no activations, and losses are not summed in float32.
SUMS = ("allreduce", "reduce_scatter", "alltoall", "all_to_all", "send")
VARIABLE = "SPINDLE_TEST_FAULTS"
LAUNCHER = "SPINDLE_TEST_LAUNCHER"


@dataclass(frozen=True)
class Fault:
    """`deed` happens on `rank` in the `step`-th step that its process trains (from 1), at `place`:
    'forward', 'backward', 'sum' or 'checkpoint' (the first file of one that is written from that step on).
    """

    deed: str
    place: str = "forward"
    rank: int = 1
    step: int = 2


def write_faults(folder: Path, *faults: Fault) -> dict[str, str]:
    """Arm them; what to add to the environment of this process, which launches, or of the one that does."""
    path = folder / "faults.json"
    path.write_text(json.dumps([asdict(fault) for fault in faults]))
    return {VARIABLE: str(path), LAUNCHER: str(os.getpid())}


def is_worker() -> bool:
    """Whether this process is one of several, by what it runs: what a workload is told is that it is alone,
    and it is built before the others are met.
    """
    return sys.argv[0].endswith(("spindle_cli.runtime.worker", "spindle_cli/runtime/worker.py"))


def rank() -> int:
    return distributed_c10d._world._default_pg.rank()


class Injector:
    """This process's share of the faults."""

    def __init__(self) -> None:
        self._path = Path(os.environ[VARIABLE]) if VARIABLE in os.environ and is_worker() else None
        self._step = 0

    def begin_step(self) -> None:
        self._step += 1

    def strike(self, place: str) -> float:
        """Do what is due here; the factor of the loss."""
        due = self._take(place)
        if due is None:
            return 1.0
        DEEDS[due]()
        return float("nan") if due == "nan" else 1.0

    def _take(self, place: str) -> str | None:
        """The first fault that has not happened yet, if now is its moment."""
        if self._path is None:
            return None
        faults = [Fault(**each) for each in json.loads(self._path.read_text())]
        if not faults or (faults[0].place, faults[0].rank) != (place, rank()):
            return None
        # A file may be written in the background, while the next step is under way.
        if self._step < faults[0].step or (self._step > faults[0].step and place != "checkpoint"):
            return None
        rest = json.dumps([asdict(fault) for fault in faults[1:]])
        whole = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        whole.write_text(rest)
        whole.replace(self._path)  # others read it at every step
        return faults[0].deed


def hang() -> None:
    while True:
        time.sleep(1)


def fail() -> None:
    raise ValueError("the layer's own error")


def stop_torchrun() -> None:
    stop(os.getppid())


def stop_launcher() -> None:
    stop(int(os.environ[LAUNCHER]))


def stop(pid: int) -> None:
    """SIGTERM to torchrun's process, or to the one that started it, until it has passed it on."""
    os.kill(pid, signal.SIGTERM)
    while not Path(sys.argv[1]).with_name(STOP_FILE).exists():
        time.sleep(0.01)


def use_up_memory() -> None:
    torch.empty(2**48)


def fill_disk() -> None:
    """Until not a byte more fits beside the file of the faults."""
    try:
        with Path(os.environ[VARIABLE]).with_name("filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
    except OSError:
        return


def cut_network() -> None:
    """Take the link of this network namespace away."""
    subprocess.run(["ip", "link", "set", os.environ["GLOO_SOCKET_IFNAME"], "down"], check=True)


def cut_network_for_5_s() -> None:
    cut_network()
    time.sleep(5)
    subprocess.run(["ip", "link", "set", os.environ["GLOO_SOCKET_IFNAME"], "up"], check=True)


DEEDS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": hang,
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "term-launcher": stop_launcher,
    "term-torchrun": stop_torchrun,
    "raise": fail,
    "memory": use_up_memory,
    "nan": lambda: None,
    "fill": fill_disk,
    "cut": cut_network,
    "cut-5": cut_network_for_5_s,
}
INJECTOR = Injector()


class FaultyHead(Head):
    """The last layer of both tasks; that of the larger one is where a step's faults are due."""

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        looked_at = x.is_meta or type(x) is not Tensor or not torch.is_grad_enabled()  # not trained
        if looked_at or self.task != "large":
            return super().forward(x, label)
        INJECTOR.begin_step()
        if x.requires_grad:
            x.register_hook(lambda _: INJECTOR.strike("backward") and None)
        return super().forward(x, label) * INJECTOR.strike("forward")


def wrap_others() -> None:
    """Strike in gradient sums, once one is under way, and when a checkpoint's file is made safe."""
    for name in dir(dist.ProcessGroup):
        if name.lstrip("_").startswith(SUMS):
            setattr(dist.ProcessGroup, name, _striking_in_sum(getattr(dist.ProcessGroup, name)))
    fsync = os.fsync

    def striking_fsync(descriptor: int) -> None:
        if "/.step-" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            INJECTOR.strike("checkpoint")
        fsync(descriptor)

    os.fsync = striking_fsync


def _striking_in_sum(collective: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(collective)
    def striking(group: dist.ProcessGroup, tensors: Any, *arguments: Any, **settings: Any) -> Any:
        work = collective(group, tensors, *arguments, **settings)
        first = tensors if isinstance(tensors, Tensor) else tensors[0]
        if first.dtype is torch.float32:
            INJECTOR.strike("sum")
        return work

    return striking


def build(dropout: float = 0.3) -> Workload:
    workload = toy_workload.build(dropout)
    for task in workload.tasks:
        head = FaultyHead()
        head.task = task.name
        task.module.head = head
    return Workload("toy", workload.tasks, operators=(Block, FaultyHead))


if is_worker():
    wrap_others()
