"""How errors of ours that a script does not catch are shown: as one message, with the exit code."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from spindle_cli.errors import SpindleError


def show_errors_plainly() -> None:
    """From now on an uncaught `SpindleError` ends this process with its message and its exit code."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, SpindleError):
            before(kind, error, trace)
            return
        message = "\n  ".join((error.message, *getattr(error, "__notes__", ())))
        hint = "" if error.hint is None else f"\n  {error.hint}"
        sys.stdout.flush()
        # In a process group torch has a hook of its own around this one, for which sys.stderr is a buffer
        # that it prints when this one returns.
        stream = sys.__stderr__ or sys.stderr
        stream.write(f"error: {message}{hint}\n")
        stream.flush()
        os._exit(error.exit_code)  # communicators' threads can hang the interpreter's own shutdown

    sys.excepthook = show
