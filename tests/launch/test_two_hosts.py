"""The same command on two hosts, made of network namespaces with a link between them, trains as one run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.cli import Ended, spindle_process
from helpers.toy_plan import write_toy
from spindle_cli.run_files import read_metrics

HOSTS = {"spindle-a": "10.77.0.1", "spindle-b": "10.77.0.2"}
PORT = 29517


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def two_hosts() -> Iterator[None]:
    """Two namespaces, each with its loopback and one end of a link."""
    if not shutil.which("ip") or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the `ip` command")
    try:
        for host in HOSTS:
            ip("netns", "add", host)
    except subprocess.CalledProcessError as refused:
        pytest.skip(f"no network namespaces here: {refused.stderr.strip()}")
    try:
        ip(
            "link",
            "add",
            "spl-a",
            "netns",
            "spindle-a",
            "type",
            "veth",
            "peer",
            "spl-b",
            "netns",
            "spindle-b",
        )
        for host, end in zip(HOSTS, ("spl-a", "spl-b"), strict=True):
            ip("-n", host, "address", "add", f"{HOSTS[host]}/24", "dev", end)
            ip("-n", host, "link", "set", end, "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for host in HOSTS:
            ip("netns", "delete", host)


def launch_on(hosts: dict[str, str], folder: Path) -> list[Ended]:
    """`spindle launch` on every host at once, with node ranks in their order."""
    master = f"{next(iter(hosts.values()))}:{PORT}"
    started = [
        spindle_process(
            *("launch", folder / "plan.yaml", "--node-rank", rank, "--master", master, "--json"),
            prefix=("ip", "netns", "exec", host),
            cwd=folder,
        )
        for rank, host in enumerate(hosts)
    ]
    ended = []
    for process in started:
        out, err = process.communicate(timeout=150)
        ended.append(Ended(process.returncode, out, err))
    return ended


@pytest.mark.processes
@pytest.mark.usefixtures("two_hosts")
def test_two_hosts_train_as_one_run(tmp_path: Path) -> None:
    write_toy(tmp_path, devices_per_node=1)
    first, second = launch_on(HOSTS, tmp_path)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert [metrics.step for metrics in read_metrics(tmp_path / "runs" / "toy-1")] == [1, 2, 3, 4]
    report = json.loads(first.out)
    assert (report["workers"], report["node_rank"], report["steps"]) == (1, 0, 4)
    assert json.loads(second.out)["node_rank"] == 1
    request = tmp_path / "runs" / "toy-1" / "workers" / "node-1.request.json"
    assert json.loads(request.read_text())["backend"] == "gloo"
