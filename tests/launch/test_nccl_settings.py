"""What CUDA and NCCL are asked for, and that the user's own variables go before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spindle_cli.launch.build import worker_environment
from spindle_cli.launch.types import Address, NodeShare
from spindle_cli.process.environment import set_unless_chosen
from spindle_cli.runtime.connecting import nccl_settings

SHARE = NodeShare(0, 1, 2, Address("127.0.0.1", 0), "eth1")


def test_the_users_interface_for_nccl_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert worker_environment(1, "nccl", SHARE)["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert "NCCL_SOCKET_IFNAME" not in worker_environment(1, "gloo", SHARE)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert "NCCL_SOCKET_IFNAME" not in worker_environment(1, "nccl", SHARE)


def test_what_the_user_has_set_is_not_set_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = nccl_settings(tmp_path)
    for name in settings:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    set_unless_chosen(settings)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"].startswith(str(tmp_path / "workers"))
    for name in settings:
        monkeypatch.delenv(name)


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.mark.parametrize("chosen", ALLOCATOR)
def test_segments_of_memory_grow_unless_the_user_sets_up_the_allocator(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert worker_environment(1, "nccl", SHARE)[ALLOCATOR[0]] == "expandable_segments:True"
    assert not set(ALLOCATOR) & set(worker_environment(1, "gloo", SHARE))
    monkeypatch.setenv(chosen, "max_split_size_mb:128")
    assert not set(ALLOCATOR) & set(worker_environment(1, "nccl", SHARE))


def test_the_users_handling_of_errors_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    assert worker_environment(1, "nccl", SHARE)[name] == "1"
    monkeypatch.setenv(name, "0")
    assert name not in worker_environment(1, "nccl", SHARE)
