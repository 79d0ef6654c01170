"""What every rank says at the end of a run, handed to rank 0 as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from spindle_cli.runtime.backends.host_group import host_group


def gather_json(mine: Any) -> list[Any] | None:
    """Every rank's data, by rank, on rank 0; None on the others. Collective.

    It travels as bytes, padded to the longest.
    """
    data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    size, group = torch.tensor([len(data)], dtype=torch.int64), host_group()
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size, group=group)
    padded = torch.zeros(max(int(length.item()) for length in sizes), dtype=torch.uint8)
    padded[: len(data)] = data
    if dist.get_rank() != 0:
        dist.gather(padded, dst=0, group=group)
        return None
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.gather(padded, gathered, dst=0, group=group)
    return [
        json.loads(bytes(encoded[: int(length.item())].numpy()))
        for encoded, length in zip(gathered, sizes, strict=True)
    ]
