"""Prove at the start that every rank holding a parameter holds the same values of it, and will go on to."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from spindle_cli.errors import InputError, RunFailedError
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.workload.initial.types import OwnValues

# A rank that does not hold a parameter puts in what changes no maximum.
_NOT_HELD = -(2**40)


def check_replicas(
    names: Sequence[str],
    held: Mapping[str, nn.Parameter],
    shards: Mapping[str, OwnValues] | None = None,
) -> None:
    """Compare checksums of all ranks' parameters in one collective.

    Args:
        names: canonical names of all parameters, the same sequence on every rank.
        held: this rank's.
        shards: of those of which this rank has a range: what was seen of them while they were whole counts.

    Raises:
        RunFailedError: two ranks hold different values of a parameter; names it.
    """
    checksums = torch.tensor(
        [
            [_NOT_HELD, _NOT_HELD]
            if (digest := _checksum(name, held, shards or {})) is None
            else [digest, -digest]
            for name in names
        ],
        dtype=torch.int64,
    )
    dist.all_reduce(checksums, op=dist.ReduceOp.MAX, group=host_group())
    for name, (highest, negated_lowest) in zip(names, checksums.tolist(), strict=True):
        if highest != -negated_lowest and highest != _NOT_HELD:
            raise RunFailedError(
                f"parameter {name!r} does not start with the same values on every rank that holds it",
                hint="Let the workload's build draw its initial values from torch's generator alone, "
                "so that a seed fixes them; not from the time, the process, or a string's hash.",
            )


def require_like_devices(steppers: Mapping[str, Sequence[int]], device: torch.device) -> None:
    """Refuse devices of different kinds that each make the gradient of a matrix for themselves: libraries
    round its product otherwise on another card, so that the replicas would drift apart. Collective.

    Args:
        steppers: the ranks that gather what its gradient is made of, by the matrix; the same on all ranks.
        device: this rank's.

    Raises:
        InputError: two of a matrix differ; the same on all ranks.
    """
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, device_name, group=host_group())
    for matrix, ranks in steppers.items():
        first = ranks[0]
        for rank in ranks:
            if names[rank] != names[first]:
                raise InputError(
                    f"the gradient of {matrix!r} is gathered, and each rank multiplies it for itself: rank "
                    f"{first} on {names[first]!r}, rank {rank} on {names[rank]!r}, which round differently",
                    hint="Plan with --sums dense, or tell the types apart in the cluster file.",
                )


def _checksum(name: str, held: Mapping[str, nn.Parameter], shards: Mapping[str, OwnValues]) -> int | None:
    if name in shards:
        return shards[name].fingerprint
    return checksum(held[name]) if name in held else None


def checksum(parameter: nn.Parameter) -> int:
    """CRC-32 of the values' bytes."""
    flat = parameter.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
