"""Which GPU each process of a node has: its own, or in tests one that several share."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.plans import two_towers
from spindle_cli.errors import InputError, UsageError
from spindle_cli.files.request import RunRequest
from spindle_cli.launch.devices import missing_devices
from spindle_cli.process.devices import gpu_of, places_on_gpus, sharing_settings
from spindle_cli.process.environment import WorkerEnvironment, ranks_per_gpu
from spindle_cli.profile.machine.machine import describe_device
from spindle_cli.profile.profiling import _num_processes
from spindle_cli.runtime.connecting import select_device, settle_process

TORCHRUN = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    "MASTER_ADDR": "127.0.0.1",
}
NCCL = ("NCCL_HOSTID", "NCCL_NET", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine that has two GPUs, of 80 bytes; those that a process has chosen."""
    chosen: list[torch.device] = []
    for name in ("SPINDLE_RANKS_PER_GPU", *NCCL):
        monkeypatch.setenv(name, "")  # so that it is as it was behind the test, whoever sets it
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return chosen


def rank(number: int) -> WorkerEnvironment:
    """Of a node of three."""
    return WorkerEnvironment(3 + number, number, 6, 3, "127.0.0.1", 0)


def request_in(folder: Path) -> RunRequest:
    return RunRequest(
        plan=folder / "p", workload="w", steps=1, run_dir=folder, device_type="cuda", backend="nccl"
    )


def test_each_process_has_a_gpu_of_its_own(tmp_path: Path, two_gpus: list[torch.device]) -> None:
    request = request_in(tmp_path)
    assert places_on_gpus() == 2
    assert [select_device(request, rank(number)).index for number in (0, 1)] == [0, 1]
    with pytest.raises(InputError, match="3 devices on this node, but torch finds 2"):
        select_device(request, rank(2))
    assert [device.index for device in two_gpus] == [0, 1]
    assert sharing_settings(1) == {}
    assert describe_device("cuda", 2).memory_bytes == 80


def test_ranks_share_gpus_in_turn_and_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_gpus: list[torch.device]
) -> None:
    monkeypatch.setenv("SPINDLE_RANKS_PER_GPU", "2")
    request = request_in(tmp_path)
    assert places_on_gpus() == 4
    assert [gpu_of(local) for local in range(4)] == [0, 1, 0, 1]
    assert select_device(request, rank(2)).index == 0
    assert describe_device("cuda", 4).memory_bytes == 40
    assert _num_processes("cuda", None, 4) == 4
    with pytest.raises(UsageError, match="--nproc 5: this machine has 4 CUDA devices"):
        _num_processes("cuda", None, 5)


def test_a_launch_counts_places(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = two_towers()
    node = plan.cluster.nodes[0].model_copy(update={"device": "h100"})
    gpus = plan.model_copy(update={"cluster": plan.cluster.changed(nodes=(node,))})
    with pytest.raises(InputError, match=r"4 devices \(h100\) on this node; found 2"):
        missing_devices(gpus, 4)
    monkeypatch.setenv("SPINDLE_RANKS_PER_GPU", "2")
    assert missing_devices(gpus, 4) == ()


def test_ranks_that_share_a_gpu_are_hosts_of_their_own_to_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rank among all: local ranks are the same on each node. What was set for all gives way."""
    settle_process(request_in(tmp_path), rank(1))
    assert [os.environ.get(name) for name in NCCL] == [None, None, None]
    monkeypatch.setenv("SPINDLE_RANKS_PER_GPU", "3")
    monkeypatch.setenv("NCCL_HOSTID", "one")
    settle_process(request_in(tmp_path), rank(1))
    assert [os.environ.get(name) for name in NCCL] == ["rank-4", "Socket", "lo"]


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_what_is_no_number_of_ranks_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPINDLE_RANKS_PER_GPU", text)
    with pytest.raises(UsageError, match=f"SPINDLE_RANKS_PER_GPU={text}: expected a number of ranks"):
        ranks_per_gpu()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"SPINDLE_RANKS_PER_GPU={text}: expected a number of ranks"):
        WorkerEnvironment.read()  # also of a worker that has no GPU
