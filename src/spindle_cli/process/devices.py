"""What of the machine's CPUs and GPUs a process may use: the cores of its affinity, the time that its
container grants it, which GPU is its own, whether it may be forked, and how the C library's allocator keeps
memory.

Linux's control groups (cgroups) limit a container to so many microseconds of processor time in each period,
over all its cores (kernel documentation, admin-guide/cgroup-v2.rst "cpu.max" and scheduler/sched-bwc.rst).
Affinity does not show that.

SPINDLE_RANKS_PER_GPU=N puts N ranks on every GPU, so that one GPU shows what several would, as in tests. NCCL
refuses two ranks on one device of one host; ranks that each name another host are taken for ranks on several
hosts, which talk through sockets, here of the loopback device.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from spindle_cli.process.environment import ranks_per_gpu
from spindle_cli.units import MIB

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")

_Reader = Callable[[Path], float | None]


def cpu_model() -> str:
    """The processor's name as its maker gives it; the architecture where the system does not say."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """CPU cores that this process may use, at least one; a part of a core that is granted does not count."""
    return max(1, int(cores_of_time()))


def cores_of_time() -> float:
    """How many cores' worth of time this process may use, parts of a core included: no more than it may run
    on, and than it is granted.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = granted_cores()
    return allowed if granted is None else min(allowed, granted)


def granted_cores(root: Path = _CGROUPS, own_groups: Path = _OWN_GROUPS) -> float | None:
    """Cores' worth of time that the process's control groups grant; None: as much as there is.

    Of a group and all around it the least counts. Inside a container the files of its own group are at the
    root, whatever the group is called outside.
    """
    try:
        lines = own_groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits: list[float] = []
    for line in lines:
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if not controllers:  # version 2
            limits += _limits(root, group, _version_2)
        elif "cpu" in controllers.split(","):
            for folder in dict.fromkeys((controllers, "cpu", "cpu,cpuacct")):
                limits += _limits(root / folder, group, _version_1)
    return min(limits, default=None)


def _limits(root: Path, group: str, read: _Reader) -> Iterator[float]:
    """Read the limits of a group and of all around it, up to the root."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        try:
            limit = read(root.joinpath(*parts[:count]))
        except (OSError, ValueError):
            continue  # not there, or not to be read: no limit that we know of
        if limit is not None:
            yield limit


def _version_2(folder: Path) -> float | None:
    quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
    return None if quota == "max" else _cores(int(quota), int(period))


def _version_1(folder: Path) -> float | None:
    quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
    return _cores(quota, int((folder / "cpu.cfs_period_us").read_text(encoding="utf-8")))


def _cores(quota_us: int, period_us: int) -> float | None:
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def places_on_gpus() -> int:
    """How many processes of this node may each have a GPU, or their part of one."""
    import torch  # not above: launching for CPUs asks for none of it

    return torch.cuda.device_count() * ranks_per_gpu()


def gpu_of(local_rank: int) -> int:
    """The number of the GPU of a process, which has one of the node's places."""
    import torch

    return local_rank % torch.cuda.device_count()


def sharing_settings(rank: int) -> dict[str, str]:
    """What NCCL is told, before it starts, in a process that shares its GPU; nothing where none does.

    The first of them is the rank's alone: it must not be what the user has set for all.
    """
    if ranks_per_gpu() == 1:
        return {}
    return {"NCCL_HOSTID": f"rank-{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_INT = 2**31 - 1
# The most that every glibc accepts (mallopt(3)); by itself it grows up to this as well.
_MMAP_THRESHOLD_BYTES = 32 * MIB


def keep_freed_memory() -> None:
    """Let the allocator keep what is freed for the next step, which needs as much again; glibc only.

    Otherwise it hands memory back to the kernel at the end of every backward pass, and gets it again page by
    page: 3 % to 5 % of an iteration of `senses-6` on one core (2 cores, no GPU, 2026-11-21).
    """
    _set(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    _set(_M_TRIM_THRESHOLD, _LARGEST_INT)


def give_back_freed_memory() -> None:
    """Let the allocator hand back every larger piece that is freed, until `keep_freed_memory`; glibc only.

    While a workload is built, parameters come and go that are larger than what stays of them, and what stays
    would lie scattered over all that they have taken. So do gradients while devices share out parameters.
    """
    _set(_M_MMAP_THRESHOLD, MIB)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(parameter, value)


def may_fork() -> bool:
    """Whether processes may be forked from this one, and have torch, and what was found of the workload, at
    once, as those of torch data loaders: without a CUDA context or a pool of threads, and not with the
    libraries of macOS.

    A torch that is built for an accelerator starts a thread for each, also for the one that stands for all
    behind tensors without data where the machine has none; and autograd refuses to run in a fork of that.
    """
    import torch

    return sys.platform == "linux" and torch.accelerator.current_accelerator() is None
