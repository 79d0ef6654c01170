"""What holds for every test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let an interrupt interrupt, here and in the processes that tests start.

    A shell starts what runs in its background with SIGINT ignored, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
