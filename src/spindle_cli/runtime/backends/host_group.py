"""What ranks tell each other outside of a step goes over gloo, through the memory of their hosts.

NCCL connects a rank with each one that it first talks to, and takes memory of the device for it. At the first
checkpoint, when a plan has filled the device, rank 0 would take buffers for every other rank that no account
of memory has: seven of a node are 784 MiB (`costs/links.py`). And an object, or a size, that comes
over NCCL has the host wait for the device.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

_joined: dist.ProcessGroup | None = None


def join_host_group(timeout_s: float) -> None:
    """Join what `host_group` gives from here on; collective, as everything that goes over it."""
    global _joined
    is_world = dist.get_backend() == "gloo"
    _joined = None if is_world else dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def host_group() -> dist.ProcessGroup | None:
    """All ranks, for tensors on the host; None is torch's default group, where that is over gloo."""
    return _joined
