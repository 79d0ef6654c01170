"""Two hosts on one machine: network namespaces, a pair of virtual network devices between them, and a shaped
link.

Each host gets one core. Needs root, iproute2 (`ip`, `tc`) and `taskset`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runtime_bench.errors import BenchError
from runtime_bench.quota import Quota

ADDRESSES = ("10.79.0.1", "10.79.0.2")
DEVICE = "link0"
PORT = 29533
# What the shaper lets through at once after a pause, and how long it holds packets back at most.
_BURST, _LATENCY = "128k", "50ms"


@dataclass(frozen=True)
class Host:
    """A network namespace with an address, and the core that its processes are pinned to.

    `quota`: the control group that its processes are moved to once they have started, if any.
    """

    rank: int
    namespace: str
    address: str
    core: int
    quota: Quota | None = None

    def command(self, words: Sequence[str | Path]) -> list[str]:
        """`words`, run on this host."""
        pinned = ["taskset", "-c", str(self.core), *(str(word) for word in words)]
        return ["ip", "netns", "exec", self.namespace, *pinned]

    def slow_down(self) -> None:
        """Move all that runs on this host to its control group.

        Raises:
            BenchError: the group does not take them.
        """
        if self.quota is not None:
            self.quota.take(map(int, _run(["ip", "netns", "pids", self.namespace]).split()))


def require_tools() -> None:
    """Whether two hosts can be made here.

    Raises:
        BenchError: naming what is missing.
    """
    missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if missing:
        raise BenchError(f"{', '.join(missing)} not found; install iproute2 and util-linux (Debian's names)")
    if os.geteuid() != 0:
        raise BenchError("network namespaces need root: run this command as root")
    if len(os.sched_getaffinity(0)) < len(ADDRESSES):
        raise BenchError(f"{len(ADDRESSES)} cores are needed, one for each host")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with an unshaped link between them, gone afterwards.

    Raises:
        BenchError: the kernel refuses namespaces or virtual devices.
    """
    cores = sorted(os.sched_getaffinity(0))
    first, second = (
        Host(rank, f"spindle-bench-{os.getpid()}-{rank}", address, cores[rank])
        for rank, address in enumerate(ADDRESSES)
    )
    made: list[Host] = []
    try:
        for host in (first, second):
            _ip("netns", "add", host.namespace)
            made.append(host)
        pair = [
            word
            for host in (first, second)
            for word in (DEVICE, "netns", host.namespace, "type", "veth", "peer")
        ]
        _ip("link", "add", *pair[:-3])
        for host in (first, second):
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", DEVICE)
            _ip("-n", host.namespace, "link", "set", DEVICE, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in made:
            with suppress(BenchError):
                _ip("netns", "delete", host.namespace)


def shape(hosts: Sequence[Host], mbit_per_s: int) -> None:
    """Give the link this speed, each way."""
    for host in hosts:
        rule = ["tc", "qdisc", "replace", "dev", DEVICE, "root", "tbf", "rate", f"{mbit_per_s}mbit"]
        _run(["ip", "netns", "exec", host.namespace, *rule, "burst", _BURST, "latency", _LATENCY])


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def run_on_both(
    hosts: Sequence[Host],
    commands: Sequence[Sequence[str | Path]],
    *,
    timeout_s: float,
    folder: Path,
    started: Callable[[], bool] = lambda: True,
) -> None:
    """Run one command on each host at once, in `folder`; the first that fails ends the other.

    Args:
        started: whether hosts may be slowed down from now on.

    Raises:
        BenchError: a command failed, with the end of its output, or took longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        logs = [Path(temporary) / f"host-{host.rank}.log" for host in hosts]
        running = [
            _start(host, words, log, folder) for host, words, log in zip(hosts, commands, logs, strict=True)
        ]
        give_up_at = time.monotonic() + timeout_s
        slowed_down = False
        try:
            while any(process.poll() is None for process in running):
                if any(process.returncode for process in running) or time.monotonic() > give_up_at:
                    break
                if not slowed_down and started():
                    slowed_down = True
                    for host in hosts:
                        host.slow_down()
                time.sleep(0.05)
        finally:
            for process in running:
                _end(process)
        for host, process, log in zip(hosts, running, logs, strict=True):
            if process.returncode != 0:
                tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-20:])
                raise BenchError(f"host {host.rank} ended with code {process.returncode}:\n{tail}")


def _start(host: Host, words: Sequence[str | Path], log: Path, folder: Path) -> subprocess.Popen[bytes]:
    additions = {
        "RANK": str(host.rank),
        "WORLD_SIZE": str(len(ADDRESSES)),
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": DEVICE,
    }
    with log.open("wb") as file:
        return subprocess.Popen(
            host.command(words),
            env={**os.environ, **additions},
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def python(*words: str | Path) -> list[str | Path]:
    """A command of this interpreter."""
    return [sys.executable, *words]
