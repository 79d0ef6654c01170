"""What every rank says at the end of a run, handed to rank 0 as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(mine: Any, device: torch.device) -> list[Any] | None:
    """Every rank's data, by rank, on rank 0; None on the others. Collective.

    It travels as bytes, padded to the longest.
    """
    data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    padded = torch.zeros(max(int(each.item()) for each in sizes), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    if dist.get_rank() != 0:
        dist.gather(padded, dst=0)
        return None
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.gather(padded, gathered, dst=0)
    return [
        json.loads(bytes(each[: int(length.item())].cpu().numpy()))
        for each, length in zip(gathered, sizes, strict=True)
    ]
