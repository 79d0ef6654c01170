"""Python's garbage collector in the command's own process."""

from __future__ import annotations

import gc

# Objects made, less those that are gone, before the newest are looked through; Python's own default is 700.
MADE_IN_BETWEEN = 100_000


def look_for_garbage_rarely() -> None:
    """Let the collector run less often, for commands that make few cycles.

    Planning makes millions of small objects that go as soon as nobody refers to them, and hardly any that
    refer to each other, for which the collector would look all the time.
    """
    gc.set_threshold(MADE_IN_BETWEEN, *gc.get_threshold()[1:])
