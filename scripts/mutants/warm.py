"""A process that has loaded what is slow to load, and runs tests in forks of itself: a mutant costs the
loading of Spindle and the tests' own time.

    python -m mutants.warm

Reads jobs from standard input and answers each on standard output, a JSON document a line. In a copy of the
tree, with its `src`, `tests` and `scripts` first on the path. A job:

    {"groups": [[file, [test, ...]], ...], "record": bool, "seconds": s, "limits": {test: s}, "output": path}

The groups are run in order until one fails; `record` runs all of a file's tests and writes to `output` what
they execute (`recording.py`). The answer is what the fork wrote there; `{"late": true}` if it took longer
than `seconds`, and `{"died": code}` if it ended without a word.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Loaded before the fork; nothing of Spindle's.
_SLOW = (
    "hypothesis",
    "networkx",
    "numpy",
    "psutil",
    "pulp",
    "highspy",
    "pydantic",
    "pytest",
    "rich.console",
    "safetensors.torch",
    "torch",
    "torch.distributed",
    "torch.fx",
    "typer",
    "yaml",
)
_MEMORY = 6 * 2**30  # a bug may ask for any
_SET_DEATH_SIGNAL = 1  # linux/prctl.h: of a child, when its parent dies
_SET_CHILD_SUBREAPER = 36  # orphans of a test's processes become ours


def main() -> None:
    """Serve jobs until standard input ends."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in _SLOW:
        __import__(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, _stop)
    # Whoever asked may have gone meanwhile.
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin:
            print(json.dumps(_in_fork(json.loads(line), answers.fileno())), file=answers, flush=True)


def _stop(*_: object) -> None:
    """End what runs, undisturbed by a second signal."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def _in_fork(job: dict[str, Any], answers: int) -> dict[str, Any]:
    output = Path(job["output"])
    output.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os.close(answers)  # whoever waits for an answer sees when this process's parent dies
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _run_and_exit(job)
    try:
        code = _wait(pid, time.monotonic() + job["seconds"])
    finally:
        _end_all()
    if code is None:
        return {"late": True}
    return json.loads(output.read_text()) if output.exists() else {"died": code}


def _wait(pid: int, until: float) -> int | None:
    """A child's exit status; None if it has not ended in time, or whoever asked has gone."""
    asking = select.poll()
    asking.register(sys.stdin, 0)  # tells when its other end is closed, whatever is asked for
    while time.monotonic() < until and not asking.poll(20):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
    return None


def _end_all() -> None:
    """End the child and whatever it started and left."""
    import psutil

    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _run_and_exit(job: dict[str, Any]) -> None:
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = f"{folder}/hypothesis"
            from mutants import recording, running

            answer = recording.record(job, Path(folder)) if job.get("record") else running.run(job)
        output = Path(job["output"])
        partial = output.with_suffix(".part")
        partial.write_text(json.dumps(answer))
        partial.rename(output)
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
