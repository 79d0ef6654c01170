"""The one place where an exception becomes a message and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from spindle_cli.cli.printable import printable
from spindle_cli.errors import ExitCode, SpindleError

# Beyond the contract's codes, by the shells' and sysexits.h's conventions.
INTERRUPTED = 130  # 128 + SIGINT
READER_GONE = 141  # 128 + SIGPIPE: `spindle show ... | head`
OUR_BUG = 70  # EX_SOFTWARE
# What is wrong with a file that the user has named, where nobody has said more of it.
_OF_NAMES = (
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
)


@contextmanager
def end_with(*, debug: bool) -> Iterator[None]:
    """Turn what the block raises into one message on standard error and `typer.Exit` with the exit code.

    Usage errors (typer's own) and `typer.Exit` pass. `debug` adds the traceback.
    """
    try:
        yield
    except (SpindleError, KeyboardInterrupt, OSError) as error:
        if debug:
            traceback.print_exc()
        raise typer.Exit(_report(error)) from error
    except SystemExit as error:
        if isinstance(error.code, ExitCode):  # ours: a second SIGTERM
            raise
        if debug:
            traceback.print_exc()
        from spindle_cli.process.worker_session import left_early

        raise typer.Exit(_report(left_early(error))) from error
    except Exception as error:
        if _is_typers_own(error):
            if isinstance(message := getattr(error, "message", None), str):
                error.message = printable(message)  # type: ignore[attr-defined]  # typer shows it
            raise
        if debug:
            traceback.print_exc()
        raise typer.Exit(_report(error)) from error


def _is_typers_own(error: Exception) -> bool:
    """Usage errors and exits, whose base classes moved between modules from one typer version to the next."""
    return type(error).__module__.split(".")[0] in ("typer", "click")


def _report(error: BaseException) -> int:
    """Say what happened, and return the exit code."""
    if isinstance(error, SpindleError):
        _say(f"error: {error}")
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        _say("interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        _abandon_output()
        return READER_GONE
    if isinstance(error, OSError) and error.filename is not None and error.errno in _OF_NAMES:
        _say(f"error: {error.filename}: {error.strerror}")
        return ExitCode.BAD_INPUT
    if isinstance(error, OSError):  # of the machine, not of the user's files: those have their own messages
        _abandon_output()
        _say(f"error: {error.filename or 'standard output'}: {error.strerror}")
        return ExitCode.FAILED
    place = traceback.extract_tb(error.__traceback__)[-1]
    _say(
        f"internal error: {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})\n"
        "  This is a bug in spindle. Run the same command as `spindle --debug ...` and report what it prints."
    )
    return OUR_BUG


def _abandon_output() -> None:
    """Let what is still buffered not fail again when the interpreter flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr)
