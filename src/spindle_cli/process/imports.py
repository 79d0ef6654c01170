"""Import large libraries fast."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """What is imported inside the block is not garbage: none is looked for inside, and later not among it.

    Looking for it again and again takes a third of the time that importing torch takes. In a process that is
    forked later it would also touch, and so copy, every page of memory that the two share.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
