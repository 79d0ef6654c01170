"""Standard input and output where whoever started the process has closed them."""

from __future__ import annotations

import os
import sys


def open_standard_files() -> None:
    """Let what is closed lead nowhere (`spindle ... >&-`): else the next file opened is taken for it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
