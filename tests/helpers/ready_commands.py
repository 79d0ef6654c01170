"""`spindle ARGUMENTS` as a process that has torch at once; what it starts has so as well."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from tempfile import TemporaryFile

from helpers.ready_python import ReadyPython


class ReadyCommand(ReadyPython):
    """With what is used of `helpers.cli.spindle_process`.

    Args:
        asking: where to ask the forker.
    """

    def __init__(self, asking: socket.socket, *arguments: object) -> None:
        with ExitStack() as files:
            self._out, self._err = (files.enter_context(TemporaryFile("w+")) for _ in range(2))
            command = [sys.executable, "-m", "spindle_cli", *map(str, arguments)]
            super().__init__(asking, command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err)
            self._files = files.pop_all()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; what it has said, on standard output and error. Once."""
        with self._files:
            self.wait(timeout)
            for file in (self._out, self._err):
                file.seek(0)
            return self._out.read(), self._err.read()
