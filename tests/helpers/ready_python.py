"""Pythons that have torch at once, for tests that start many: forked, see `forker`.

That a command of ours is a Python of its own which imports what it needs is what the tests of `launch` show,
of `verify` too, with real ones.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).parent.parent
HERE = "/proc/self/ns/net"
MEASURED_BY = "COVERAGE_PROCESS_START"  # coverage's variable: its configuration
ADDRESS = "SPINDLE_TEST_FORKER"  # in the environment: where to ask, in hexadecimal digits
Stream = int | IO[Any] | None


@contextmanager
def forker() -> Iterator[socket.socket]:
    """Where to ask a forker: that of the environment, else one that lasts as long as the block."""
    if ADDRESS in os.environ:
        with connected(bytes.fromhex(os.environ[ADDRESS])) as asking:
            yield asking
        return
    with started() as address, connected(address) as asking:
        yield asking


@contextmanager
def started() -> Iterator[bytes]:
    """The address of a forker that lasts as long as the block."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as requests:
        requests.bind("")  # Linux finds an address that is no file
        requests.listen()
        number = requests.fileno()
        # What is measured of a test's processes is measured in what is forked for it.
        environment = {name: value for name, value in os.environ.items() if name != MEASURED_BY}
        process = subprocess.Popen(
            [sys.executable, "-m", "helpers.forker", str(number)],
            cwd=TESTS,
            env={**environment, "OMP_NUM_THREADS": "1"},
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield requests.getsockname()
        finally:
            process.kill()
            process.wait()


def connected(address: bytes) -> socket.socket:
    """A socket through which the forker at an address is asked."""
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asking.connect(address)
    return asking


class ReadyPython:
    """`python -m MODULE ...`, with what is used of a `subprocess.Popen`.

    Args:
        asking: where to ask the forker.
        namespace: of the network, to be in; this process's own if None.
    """

    def __init__(
        self,
        asking: socket.socket,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        start_new_session: bool = False,
        namespace: Path | None = None,
    ) -> None:
        python, option, *arguments = argv
        assert (python, option) == (sys.executable, "-m"), argv
        request = {
            "arguments": arguments,
            "environment": dict(os.environ if env is None else env),
            "folder": str(cwd or Path.cwd()),
            "new_session": start_new_session,
            "elsewhere": namespace is not None,
        }
        self.argv = argv
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        with ExitStack() as files:
            self._told, tell = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            files.enter_context(tell)
            network = files.enter_context(Path(namespace or HERE).open("rb")).fileno()
            sent = [tell.fileno(), self._opened(files, 0, stdin), self._opened(files, 1, stdout)]
            sent += [sent[2] if stderr == subprocess.STDOUT else self._opened(files, 2, stderr), network]
            socket.send_fds(asking, [json.dumps(request).encode()], sent)
        self.pid = int(self._told.recv(32))

    def _opened(self, files: ExitStack, number: int, stream: Stream) -> int:
        """The file descriptor of a standard file; if it was opened for this, `files` close it."""
        if stream is None:
            return number
        if stream == subprocess.DEVNULL:
            return files.enter_context(Path(os.devnull).open("r+b")).fileno()
        if stream == subprocess.PIPE:
            assert number == 0, "output goes to a file"
            reads, writes = os.pipe()
            files.callback(os.close, reads)
            self.stdin = os.fdopen(writes, "wb")
            return reads
        assert not isinstance(stream, int)
        return stream.fileno()

    def poll(self) -> int | None:
        """Its exit code, or minus the signal's number; None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(list(self.argv), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """With a signal that cannot be ignored."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], timeout)[0]:
            with self._told:
                self.returncode = int(self._told.recv(32))
        return self.returncode
