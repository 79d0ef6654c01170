"""One rank of starts whose memory is measured: what the process takes at most until it could train.

    python -m spindle_cli.launch.starting.torchrun ... -m memory_bench.start FOLDER

For each FOLDER/*/request.json it writes FOLDER/*/start.<rank>: the most bytes beyond those before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from memory_bench.resident_memory import bytes_of, write_each
from spindle_cli.runtime.training import Training


def peak(made: Iterator[Training]) -> Iterator[int]:
    """Of a training in the making."""
    before = bytes_of("VmRSS")
    next(made)
    yield bytes_of("VmHWM") - before


def main(argv: list[str]) -> None:
    """Entry point of a rank."""
    write_each(Path(argv[1]), "start", peak)


if __name__ == "__main__":
    main(sys.argv)
