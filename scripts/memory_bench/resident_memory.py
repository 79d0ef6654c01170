"""What a rank's process has of memory, by /proc (Linux)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from spindle_cli.files.request import RunRequest
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.runtime.assembling import assemble
from spindle_cli.runtime.connecting import connected, settle_process
from spindle_cli.runtime.training import Training
from spindle_cli.units import KIB

# Gives bytes; it is handed a training that is made when it asks for it.
Measure = Callable[[Iterator[Training]], Iterator[int]]


def write_each(folder: Path, what: str, measure: Measure) -> None:
    """Have each FOLDER/*/request.json measured, and write FOLDER/*/<what>.<rank>."""
    environment, device = WorkerEnvironment.read(), torch.device("cpu")
    for path in sorted(folder.glob("*/request.json")):
        request = RunRequest.read(path)
        settle_process(request, environment)
        with connected(request, environment, device):
            forget_peak()
            found = list(measure(_made(request, environment, device)))
            target = path.parent / f"{what}.{environment.rank}"
            target.write_text(" ".join(map(str, found)), encoding="utf-8")
        gc.collect()


def _made(request: RunRequest, environment: WorkerEnvironment, device: torch.device) -> Iterator[Training]:
    training = assemble(request, environment, device)
    try:
        yield training
    finally:
        training.feed.close()


def forget_peak() -> None:
    """The most that this process has had begins anew (proc(5))."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def bytes_of(key: str) -> int:
    """A line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * KIB
    raise LookupError(key)
