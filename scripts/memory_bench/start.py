"""One rank of starts whose memory is measured: what the process takes at most until it could train.

    python -m spindle_cli.launch.starting.torchrun ... -m memory_bench.start FOLDER

For each FOLDER/*/request.json it writes FOLDER/*/start.<rank>: the most bytes beyond those before.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

from spindle_cli.files.request import RunRequest
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.runtime.assembling import assemble
from spindle_cli.runtime.connecting import connected, settle_process
from spindle_cli.units import KIB


def main(argv: list[str]) -> None:
    """Entry point of a rank."""
    environment, device = WorkerEnvironment.read(), torch.device("cpu")
    for path in sorted(Path(argv[1]).glob("*/request.json")):
        request = RunRequest.read(path)
        settle_process(request)
        with connected(request, environment, device):
            forget_peak()
            before = bytes_of("VmRSS")
            training = assemble(request, environment, device)
            taken = bytes_of("VmHWM") - before
            (path.parent / f"start.{environment.rank}").write_text(str(taken), encoding="utf-8")
            training.feed.close()
            del training
        gc.collect()


def forget_peak() -> None:
    """The most that this process has had begins anew (proc(5))."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def bytes_of(key: str) -> int:
    """A line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * KIB
    raise LookupError(key)


if __name__ == "__main__":
    main(sys.argv)
