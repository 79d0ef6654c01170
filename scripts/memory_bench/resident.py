"""One rank of trainings whose resident memory is measured.

    python -m spindle_cli.launch.starting.torchrun ... -m memory_bench.resident FOLDER

For each FOLDER/*/request.json it trains and writes FOLDER/*/resident.<rank>: the most bytes beyond those that
the process had when it had joined the others; until it could train, and in each step. No checkpoint is saved.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

from memory_bench.start import bytes_of, forget_peak
from spindle_cli.files.request import RunRequest
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.runtime.assembling import assemble
from spindle_cli.runtime.connecting import connected, settle_process


def most() -> int:
    """The most bytes so far, without libraries' code and other files, which all processes have once."""
    return bytes_of("VmHWM") - bytes_of("RssFile")


def main(argv: list[str]) -> None:
    """Entry point of a rank."""
    environment, device = WorkerEnvironment.read(), torch.device("cpu")
    for path in sorted(Path(argv[1]).glob("*/request.json")):
        request = RunRequest.read(path)
        settle_process(request)
        with connected(request, environment, device):
            forget_peak()
            before = bytes_of("RssAnon")
            training = assemble(request, environment, device)
            peaks = [most() - before]
            forget_peak()
            for _ in training.run():
                peaks.append(most() - before)
                forget_peak()
                (path.parent / f"resident.{environment.rank}").write_text(" ".join(map(str, peaks)))
            training.feed.close()
            del training
        gc.collect()


if __name__ == "__main__":
    main(sys.argv)
