"""Python's garbage collector in a worker."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_searched_again() -> Iterator[None]:
    """Inside the block the collector looks only at objects made in it.

    A worker's modules, traces and program are some hundred thousand objects that live to its end; a full
    collection, which comes every few steps, takes 0.1 to 0.2 s to find that out.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
