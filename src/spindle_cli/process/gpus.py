"""Which GPU each process of a node has: one of its own or, in tests, one that several share.

SPINDLE_RANKS_PER_GPU=N puts N ranks on every GPU, so that one GPU shows what several would. NCCL refuses two
ranks on one device of one host; ranks that each name another host are taken for ranks on several hosts, which
talk through sockets, here of the loopback device.
"""

from __future__ import annotations

from spindle_cli.process.environment import ranks_per_gpu


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
