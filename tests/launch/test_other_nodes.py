"""Nodes tell each other what they have lost, over a real store: at once in words, and by saying nothing."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistError, DistStoreError, HashStore, Store, TCPStore

from spindle_cli.launch.build import TORCHRUN
from spindle_cli.launch.starting import other_nodes
from spindle_cli.launch.starting.other_nodes import OtherNodes
from spindle_cli.launch.types import WorkerExits
from spindle_cli.process.environment import child_environment

LONG_S = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_nodes, "_BEAT_S", 0.02)


def heard(nodes: OtherNodes, within_s: float = 20.0) -> str | None:
    """The first loss that a node hears of."""
    give_up_at = time.monotonic() + within_s
    while time.monotonic() < give_up_at:
        if (loss := nodes.loss()) is not None:
            return loss
        time.sleep(0.01)
    return None


def test_a_node_that_has_lost_a_worker_is_named_once_the_others_have_had_time_to_notice() -> None:
    store = HashStore()
    one, other = (OtherNodes(store, rank, 2, silent_s=LONG_S, grace_s=0.3) for rank in (0, 1))
    time.sleep(0.1)
    assert one.loss() is None and other.loss() is None
    other.tell_loss()
    began_s = time.monotonic()
    assert heard(one) == "node 1 has lost a worker"
    assert time.monotonic() - began_s >= 0.25
    assert other.loss() is None  # of itself it knows


def test_nodes_that_say_nothing_are_lost_and_those_that_speak_are_not() -> None:
    store = HashStore()
    one = OtherNodes(store, 0, 4, silent_s=0.4, grace_s=0.0)
    speaking = OtherNodes(store, 2, 4, silent_s=LONG_S, grace_s=0.0)
    assert heard(one) == "nodes 1, 3 have said nothing for 0.4 s"
    assert speaking.loss() is None


def test_a_node_alone_hears_of_none() -> None:
    alone = OtherNodes(HashStore(), 0, 1, silent_s=0.0, grace_s=0.0)
    alone.tell_loss()
    assert alone.loss() is None


def test_the_end_of_the_node_with_the_store_is_noticed() -> None:
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), False)
    client = TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=5), False)
    nodes = OtherNodes(client, 1, 2, silent_s=LONG_S, grace_s=0.0)
    assert nodes.loss() is None
    del store
    loss = heard(nodes)
    assert loss is not None and loss.startswith("node 0 is gone, where all nodes had met: ")


class OutOfReach(Store):
    """A store that does not answer, as where the network is cut."""

    def __init__(self, answer: Callable[[], object]) -> None:
        super().__init__()
        self._answer = answer

    def set(self, key: str, value: str) -> None:
        self._answer()


def test_a_store_out_of_reach_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_nodes, "_TOLD_S", 0.05)
    nodes = OtherNodes(OutOfReach(threading.Event().wait), 0, 2, silent_s=0.2, grace_s=0.0)
    began_s = time.monotonic()
    nodes.tell_loss()
    assert heard(nodes) == "node 1 has said nothing for 0.2 s"
    assert time.monotonic() - began_s < LONG_S / 2


def test_what_cannot_be_said_is_left_unsaid() -> None:
    def refuse() -> None:
        raise DistStoreError("Broken pipe")

    assert issubclass(DistStoreError, DistError)
    nodes = OtherNodes(OutOfReach(refuse), 1, 2, silent_s=LONG_S, grace_s=0.0)
    nodes.tell_loss()
    assert heard(nodes) == "node 0 is gone, where all nodes had met: Broken pipe"


SLEEPS = """
import os, signal, sys, time
def main(argv):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
if __name__ == "__main__":
    main(sys.argv)
"""


@pytest.mark.processes
def test_workers_that_would_wait_on_are_ended_when_another_nodes_is_killed(tmp_path: Path) -> None:
    """As those on NCCL, whose connections tell them nothing."""
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", TORCHRUN, tmp_path / f"node-{node}.exits.json"),
                *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=spindle", "--max-restarts=0"),
                *(f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=rank={node}", "--start-method=spawn"),
                *("-m", "sleeps", "request"),
            ],
            env=child_environment({"PYTHONPATH": str(tmp_path)}),
            stderr=subprocess.DEVNULL,
        )
        for node in (0, 1)
    ]
    assert [each.wait(120) for each in started] == [1, 1]
    found = [WorkerExits.read(tmp_path / f"node-{node}.exits.json") for node in (0, 1)]
    assert [exits.problem for exits in found] == ["node 1 has lost a worker", None]
    assert [(died.rank, died.exit_code) for died in found[1].exits] == [(1, -signal.SIGKILL)]
