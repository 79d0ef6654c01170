"""Two hosts made of network namespaces with a link between them, and `spindle launch` on both at once."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import pytest

from helpers.cli import Ended
from helpers.ready_python import ReadyPython

# Named after this process: the names are the whole machine's.
HOSTS = {f"spindle-{os.getpid()}-a": "10.77.0.1", f"spindle-{os.getpid()}-b": "10.77.0.2"}
PORT = 29517
WAIT_S = 200


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts() -> Iterator[None]:
    """Two namespaces, each with its loopback and one end of a link; skips where there can be none."""
    if not shutil.which("ip") or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the `ip` command")
    first, second = HOSTS
    try:
        for host in HOSTS:
            ip("netns", "add", host)
    except subprocess.CalledProcessError as refused:
        pytest.skip(f"no network namespaces here: {refused.stderr.strip()}")
    try:
        ends = ("spl-a", "netns", first, "type", "veth", "peer", "spl-b", "netns", second)
        ip("link", "add", *ends)
        for host, end in zip(HOSTS, ("spl-a", "spl-b"), strict=True):
            ip("-n", host, "address", "add", f"{HOSTS[host]}/24", "dev", end)
            ip("-n", host, "link", "set", end, "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for host in HOSTS:
            ip("netns", "delete", host)


def launch_on(
    hosts: dict[str, str], folder: Path, *options: str, forker: socket.socket | None = None
) -> list[Ended]:
    """`spindle launch plan.yaml` in `folder` on every host at once, with node ranks in their order.

    `forker`: of Pythons that have torch at once; None: each is one of its own.
    """
    master = f"{next(iter(hosts.values()))}:{PORT}"
    with ExitStack() as stack:
        started = []
        for rank, host in enumerate(hosts):
            words = (
                "launch",
                folder / "plan.yaml",
                "--node-rank",
                rank,
                "--master",
                master,
                "--json",
                *options,
            )
            command = [sys.executable, "-m", "spindle_cli", *map(str, words)]
            out, err = (stack.enter_context(TemporaryFile("w+")) for _ in range(2))
            files = {"cwd": folder, "stdout": out, "stderr": err}
            process = (
                subprocess.Popen(["ip", "netns", "exec", host, *command], **files)
                if forker is None
                else ReadyPython(forker, command, **files, namespace=Path("/run/netns", host))
            )
            stack.callback(process.kill)
            started.append((process, out, err))
        return [Ended(process.wait(WAIT_S), _read(out), _read(err)) for process, out, err in started]


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
