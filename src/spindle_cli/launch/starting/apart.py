"""Start a Python of ours in a session of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from subprocess import Popen
from typing import IO

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
