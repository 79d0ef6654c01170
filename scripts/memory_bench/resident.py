"""One rank of trainings whose resident memory is measured.

    python -m spindle_cli.launch.starting.torchrun ... -m memory_bench.resident FOLDER

For each FOLDER/*/request.json it trains and writes FOLDER/*/resident.<rank>: the most bytes beyond those that
the process had when it had joined the others; until it could train, and in each step. No checkpoint is saved.
Libraries' code and other files that are mapped, which all processes have once, are not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from memory_bench.resident_memory import bytes_of, forget_peak, write_each
from spindle_cli.runtime.training import Training


def peaks(made: Iterator[Training]) -> Iterator[int]:
    """Of a training in the making, and of each of its steps."""
    before = bytes_of("RssAnon")
    training = next(made)
    yield _most() - before
    forget_peak()
    for _ in training.run():
        yield _most() - before
        forget_peak()


def _most() -> int:
    return bytes_of("VmHWM") - bytes_of("RssFile")


def main(argv: list[str]) -> None:
    """Entry point of a rank."""
    write_each(Path(argv[1]), "resident", peaks)


if __name__ == "__main__":
    main(sys.argv)
