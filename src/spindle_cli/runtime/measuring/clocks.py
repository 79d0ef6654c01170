"""How far each rank's clock is from rank 0's, so that their times can be read together.

As in NTP: rank 0 asks, a rank answers with its time, and the answer is taken to be given halfway between
question and arrival. Of several rounds the quickest counts: the answer cannot be further off than half of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from spindle_cli.runtime.backends.host_group import host_group

_ROUNDS = 8


@dataclass(frozen=True)
class Offset:
    """`ahead_s`: of rank 0's clock; `error_s`: at most so far off."""

    ahead_s: float
    error_s: float


def clock_offsets() -> list[Offset] | None:
    """The offsets of every rank's `time.perf_counter`, by rank, on rank 0; None on the others. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    message = torch.zeros(1, dtype=torch.float64)
    if rank != 0:
        for _ in range(_ROUNDS):
            dist.recv(message, src=0, group=host_group())
            dist.send(message.fill_(time.perf_counter()), dst=0, group=host_group())
        return None
    return [Offset(0.0, 0.0), *(_ask(other, message) for other in range(1, world))]


def _ask(other: int, message: torch.Tensor) -> Offset:
    rounds: list[Offset] = []
    for _ in range(_ROUNDS):
        asked_s = time.perf_counter()
        dist.send(message, dst=other, group=host_group())
        dist.recv(message, src=other, group=host_group())
        theirs_s = float(message.item())
        rounds.append(offset_of(asked_s, theirs_s, time.perf_counter()))
    return min(rounds, key=lambda offset: offset.error_s)


def offset_of(asked_s: float, theirs_s: float, answered_s: float) -> Offset:
    """From one round: when rank 0 asked and was answered, and the other's time in between."""
    return Offset(theirs_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2)
