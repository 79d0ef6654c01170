"""Saves that go on while training does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist


class BackgroundSaves:
    """One save at a time, by a thread.

    `group`: a communicator of its own, since another thread must not use those of training.
    """

    def __init__(self, timeout_s: float) -> None:
        """Collective."""
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def start(self, save: Callable[[], None], copied: threading.Event) -> None:
        """Begin a save, and return when what it saves is copied. Raises what has failed by then."""
        assert self._pending is None, "one at a time"
        self._pending = self._thread.submit(save)
        self._pending.add_done_callback(lambda _: copied.set())  # it may fail before it copies
        copied.wait()
        self.check()

    def check(self) -> None:
        """Raise what a save has failed with, if it has."""
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is under way. Raises what it has failed with."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
