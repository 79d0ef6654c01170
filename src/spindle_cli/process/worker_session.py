"""A worker's life as `launch` sees it: its output in a log of its own, and its error, if any, in a file.

Any worker module runs its work inside `worker_session`, so that `launch` can show the error that ended it. A
script that is run by itself shows such an error as the command would (`show_errors_plainly`).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from spindle_cli.errors import PeerLostError, RunFailedError, SpindleError, WorkerLostError
from spindle_cli.files.artifact import write_json
from spindle_cli.files.request import WorkerError, done_path, error_path, log_path, pid_path, stack_path
from spindle_cli.process.lifetime import die_with_parent

# Kept free on the disk, so that even the error of a full disk can be written down.
RESERVED_BYTES = 64 * 1024
_TIMED_OUT_SIGNS = ("imed out", "imeout")
_LOST_PEER_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Connection was likely closed",
    "Broken pipe",
    "Socket closed",
    "Socket Timeout",
    "Timed out waiting",
    "pair closure",
    "failed to recv, got 0 bytes",
    "remote process exited",
)


@contextmanager
def worker_session(run_dir: Path, rank: int) -> Iterator[None]:
    """A worker's whole life: its output goes to its log, and the process ends with the block.

    It ends with code 0 and says by a file that it has come to its end, or after an exception with its
    `WorkerError` written and its exit code. It also dies with its parent (Linux), so that no run outlives its
    launcher; and SIGUSR1 lets it write where it is.
    """
    redirect_output(log_path(run_dir, rank))
    die_with_parent()
    show_stack_when_asked(run_dir, rank)
    reserve = error_path(run_dir, rank).with_suffix(".room")
    reserve.write_bytes(bytes(RESERVED_BYTES))
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (Exception, SystemExit) as error:  # every error of a worker has to reach the user
        reserve.unlink(missing_ok=True)
        traceback.print_exc()
        report = describe_error(left_early(error) if isinstance(error, SystemExit) else error, rank)
        write_json(error_path(run_dir, rank), report)
        _leave(report.exit_code)
    reserve.unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # the folder was deleted: the launcher says so
        done_path(run_dir, rank).touch()
    _leave(0)


def left_early(error: SystemExit) -> RunFailedError:
    """What it means that code of the user's has ended the process, with whatever exit code."""
    code = "" if error.code is None else repr(error.code)
    return RunFailedError(
        f"sys.exit({code}) was called before the work was done, at {_place_of(error)}",
        hint="Code that a workload loads or runs must not end the process: raise an error instead.",
    )


def _leave(exit_code: int) -> NoReturn:
    """End the process at once: communicators' threads can hang or abort the interpreter's own shutdown."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def redirect_output(path: Path) -> None:
    """Send file descriptors 1 and 2 of this process, native code's output included, to the end of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()  # a crash in native code leaves the Python stack in the log


def show_stack_when_asked(run_dir: Path, rank: int) -> None:
    """From now on SIGUSR1 writes every thread's Python stack to `stack_path`, also while native code hangs.

    The process id is written last: whoever finds it may send the signal.
    """
    stack = os.open(stack_path(run_dir, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_TRUNC)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    pid_path(run_dir, rank).write_text(str(os.getpid()))


def describe_error(error: Exception, rank: int) -> WorkerError:
    """An exception as what the worker hands back."""
    is_ours = isinstance(error, SpindleError)
    message = error.message if isinstance(error, SpindleError) else str(error)
    notes = getattr(error, "__notes__", ())  # what the worker was at: a slice, or samples being loaded
    return WorkerError(
        rank=rank,
        type=type(error).__name__,
        message="\n  ".join((message, *notes)),
        hint=error.hint if isinstance(error, SpindleError) else None,
        place=None if is_ours else _place_of(error),
        traceback=None if is_ours else "".join(traceback.format_exception(error)),
        lost_peer=is_lost_peer(error),
        timed_out=is_lost_peer(error) and _any_text(error, _TIMED_OUT_SIGNS),
        may_pass=may_pass(error),
        self_explaining=is_ours,
        exit_code=int(error.exit_code) if isinstance(error, SpindleError) else 1,
        time_s=time.time(),
    )


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception, or what it follows from, is a connection that another worker's end has broken.

    torch raises plain RuntimeErrors for these; only their text tells them apart.
    """
    return any(isinstance(seen, ConnectionError | PeerLostError) for seen in _chain(error)) or _any_text(
        error, _LOST_PEER_SIGNS
    )


def may_pass(error: BaseException) -> bool:
    """Whether an exception comes from outside of the program, so that it may not come again."""
    if isinstance(error, WorkerLostError):  # a process that loads samples was killed
        return True
    if isinstance(error, SpindleError) and not isinstance(error, PeerLostError):
        return False
    return is_lost_peer(error) or any(
        isinstance(seen, OSError) or type(seen).__name__ == "AcceleratorError"  # torch's, of a broken device
        for seen in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, what it follows from, and so on."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _any_text(error: BaseException, signs: tuple[str, ...]) -> bool:
    return any(sign in str(seen) for seen in _chain(error) for sign in signs)


def _place_of(error: BaseException) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (
        "<",
        sysconfig.get_path("purelib"),
        sysconfig.get_path("stdlib"),
        str(Path(__file__).parents[1]),
    )
    user_frames = [frame for frame in frames if not frame.filename.startswith(libraries)]
    if not frames:
        return None
    frame = (user_frames or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


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
