"""What this machine is: its device, cores and memory."""

from __future__ import annotations

import os
from typing import Literal

import psutil
import torch

from spindle_cli.errors import UsageError
from spindle_cli.files.cluster import CPU, is_cpu
from spindle_cli.process.devices import cpu_model
from spindle_cli.process.environment import ranks_per_gpu
from spindle_cli.profile.types import Device

DeviceType = Literal["cpu", "cuda"]


def own_cores() -> frozenset[int]:
    """Numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def device_of_type(name: str | None) -> DeviceType:
    """Return the kind of device to measure on: of the cluster's device type `name`, or the best there is for
    None.

    Raises:
        UsageError: the cluster's devices are not of a kind that is here.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if is_cpu(name):
        return "cpu"
    if not torch.cuda.is_available():
        raise UsageError(
            f"the cluster's devices are {name!r}, but this machine has no such device",
            hint="Use --estimate to compute the curves from published peaks, or profile on such a device.",
        )
    return "cuda"


def describe_device(kind: DeviceType, processes: int, called: str | None = None) -> Device:
    """Return what each of `processes` processes of this machine has: a GPU or its part of one, or of the
    host.
    """
    if kind == "cpu":
        memory_bytes = psutil.virtual_memory().total // processes
        return Device(type=called or CPU, name=cpu_model(), memory_bytes=memory_bytes)
    properties = torch.cuda.get_device_properties(0)
    return Device(type="cuda", name=properties.name, memory_bytes=properties.total_memory // ranks_per_gpu())
