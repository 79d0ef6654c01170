"""End at once on Ctrl-C and SIGTERM, while a command has begun nothing that would have to be tidied up.

An exception raised in a handler can get lost in the code that it interrupts: an import, a callback from C,
a library that maps it to an exit code of its own. So the handlers end the process themselves.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

_TEXTS: Mapping[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}
# What a signal does where nobody has asked for something else, such as to ignore it.
_USUAL: Mapping[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@contextmanager
def ending_at_once(*numbers: int) -> Iterator[None]:
    """Inside the block these signals end the process with one line and 128 + n; afterwards they do what they
    did.

    Python gives signals to the main thread alone; in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler in (_USUAL[number], _end):
            signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interruptible() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again, for what has something to tidy up."""
    if ends_at_once(signal.SIGINT):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ends_at_once(number: int) -> bool:
    """Whether this signal does that now."""
    return signal.getsignal(number) is _end


def _end(number: int, _frame: FrameType | None) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{_TEXTS[number]}\n".encode())
    os._exit(128 + number)
