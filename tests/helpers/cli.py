"""The command line as a user runs it: inside this process, which is fast, or as one of its own."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest import mock

from spindle_cli.__main__ import main


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def run_spindle(*arguments: object) -> Ended:
    """`spindle ARGUMENTS`, through its real entry point."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["spindle", *map(str, arguments)]
    with mock.patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        else:
            code = 0
    return Ended(code, out.getvalue(), err.getvalue())


def spindle_process(*arguments: object, **settings: Any) -> subprocess.Popen[str]:
    """`spindle ARGUMENTS` as a process, its output and errors piped unless `settings` say else."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "spindle_cli", *map(str, arguments)]
    return subprocess.Popen(command, **{**pipes, **settings})
