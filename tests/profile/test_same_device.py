"""Which device a profile is of, and which a cluster file means."""

from __future__ import annotations

import pytest

from spindle_cli.profile.machine.devices import cluster_device_name, is_same_device
from spindle_cli.profile.types import Device

CPU = Device(type="cpu", name="AMD EPYC", memory_bytes=2**30)


def gpu(name: str) -> Device:
    return Device(type="cuda", name=name, memory_bytes=2**30)


def estimated(name: str) -> Device:
    return Device(type=name, name=name, memory_bytes=2**30)


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-sxm4-40gb"),  # other memory than the listed one's
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
    ],
)
def test_a_measured_gpu_has_the_listed_name_or_its_own(name: str, called: str) -> None:
    assert cluster_device_name(gpu(name)) == called


def test_a_cpu_is_a_cpu_and_nothing_else() -> None:
    assert is_same_device(CPU, "cpu")
    assert not is_same_device(CPU, "h200-141gb")
    assert not is_same_device(gpu("NVIDIA H200"), "cpu")
    assert not is_same_device(estimated("h200-141gb"), "cpu")


def test_the_long_and_the_short_name_are_the_same_device() -> None:
    for name in ("h100", "h100-80gb", "H100-80GB"):
        assert is_same_device(gpu("NVIDIA H100 80GB HBM3"), name)
        assert is_same_device(estimated("h100"), name)
    assert not is_same_device(gpu("NVIDIA H100 80GB HBM3"), "h200")
    assert not is_same_device(estimated("a800-80gb"), "a100-80gb")


def test_an_unlisted_gpu_may_be_called_by_some_of_its_words() -> None:
    device = gpu("NVIDIA GeForce RTX 4090")
    assert is_same_device(device, "rtx-4090") and is_same_device(device, "nvidia-geforce-rtx-4090")
    assert not is_same_device(device, "rtx-3090") and not is_same_device(device, "a100-80gb")
    assert not is_same_device(gpu("NVIDIA A100-SXM4-40GB"), "a100"), "the listed one has 80 GB"
