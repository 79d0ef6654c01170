"""How a process of ours begins, and how it ends.

It begins with standard files that lead somewhere, and looks for garbage rarely. Ctrl-C and SIGTERM end it at
once while it has begun nothing that would have to be tidied up. An exception raised in a handler can get lost
in the code that it interrupts: an import, a callback from C, a library that maps it to an exit code of its
own. So the handlers end the process themselves.
"""

from __future__ import annotations

import gc
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
# Objects made, less those that are gone, before the newest are looked through; Python's own default is 700.
MADE_IN_BETWEEN = 100_000
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
    """Say whether this signal ends the process at once as things are."""
    return signal.getsignal(number) is _end


def _end(number: int, _frame: FrameType | None) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{_TEXTS[number]}\n".encode())
    os._exit(128 + number)


def look_for_garbage_rarely() -> None:
    """Let the collector run less often, for commands that make few cycles.

    Planning makes millions of small objects that go as soon as nobody refers to them, and hardly any that
    refer to each other, for which the collector would look all the time.
    """
    gc.set_threshold(MADE_IN_BETWEEN, *gc.get_threshold()[1:])


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


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; does nothing but on Linux."""
    if sys.platform == "linux":
        import ctypes  # not above: it would be loaded for every command

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
