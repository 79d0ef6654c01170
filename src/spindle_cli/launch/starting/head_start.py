"""The process that will fork the workers, started in a session of its own while the launcher still checks
the plan and the workload.

It imports torch meanwhile, and waits. It touches nothing of the user's: no workload, no folder. When all is
checked it is told what to start; if not, it is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import Popen
from typing import IO, TextIO

from spindle_cli.launch.build import TORCHRUN
from spindle_cli.launch.types import Launch
from spindle_cli.process.environment import child_environment

Stream = int | IO[bytes]


def start_apart(
    argv: Sequence[str],
    additions: Mapping[str, str],
    *,
    stdin: Stream,
    stdout: Stream,
    stderr: Stream,
) -> Popen[bytes]:
    """Start a command with these additions to the environment.

    The terminal's Ctrl-C reaches the launcher alone; it ends the rest.
    """
    return Popen(
        argv,
        env=child_environment(additions),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


WAIT = "--wait"


@dataclass(frozen=True)
class Orders:
    """What the process that waits is to do: `arguments` as on its command line, with its output in `log`."""

    arguments: list[str]
    log: str

    @classmethod
    def read(cls, source: TextIO) -> Orders | None:
        """What a launcher has sent; None if it has sent nothing."""
        text = source.read()
        return cls(**json.loads(text)) if text else None

    def redirect_output(self) -> None:
        """Send this process's output, native code's included, to the end of the log."""
        with Path(self.log).open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)


class HeadStart:
    """At most one process that waits; at the end of the `with` block it is ended, unless it was taken."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: Mapping[str, str] = {}

    def __enter__(self) -> HeadStart:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process that imports what workers of these modules need, with these additions to its
        environment.
        """
        self.close()
        self._environment = environment
        self._process = start_apart(
            [sys.executable, "-m", TORCHRUN, WAIT, *modules],
            environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def take(self, launch: Launch) -> subprocess.Popen[bytes] | None:
        """The process, which now runs the launch's command; None where there is none for such a launch."""
        process, self._process = self._process, None
        if process is None:
            return None
        _, _, module, *arguments = launch.argv
        ours = module == TORCHRUN and self._environment == launch.environment
        assert process.stdin is not None
        if ours and process.poll() is None:
            orders = json.dumps(asdict(Orders(arguments, str(launch.log))))
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(orders.encode())
                process.stdin.close()
                return process
        _end(process)
        return None

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
