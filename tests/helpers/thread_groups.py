"""Tensor-parallel groups whose devices are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from spindle_cli.operators.tensor_group import TensorGroup

_Result = TypeVar("_Result")


@dataclass
class Meeting:
    """Where the threads of one group hand each other tensors."""

    size: int
    parts: dict[int, Tensor] = field(default_factory=dict)
    sums: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=120)

    def all(self, member: int, kind: str, part: Tensor) -> list[Tensor]:
        """What all threads bring to the same collective."""
        if member == 0:
            self.sums.append((kind, tuple(part.shape)))
        self.parts[member] = part.clone()
        self.barrier.wait()
        found = [self.parts[each] for each in range(self.size)]
        self.barrier.wait()
        return found


@dataclass
class ThreadGroup(TensorGroup):
    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def sum_(self, tensor: Tensor, *, is_gradient: bool) -> None:
        kind = "backward" if is_gradient else "forward"
        tensor.copy_(torch.stack(self.meeting.all(self.member, kind, tensor)).sum(0))

    def max_(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self.meeting.all(self.member, "max", tensor)).amax(0))

    def gather(self, own: Tensor, per_share: Sequence[int]) -> Tensor:
        parts = self.meeting.all(self.member, "gather", own)
        assert [len(part) for part in parts] == list(per_share)
        return torch.cat(parts)

    def scatter_sum(self, whole: Tensor, per_share: Sequence[int]) -> Tensor:
        total = torch.stack(self.meeting.all(self.member, "scatter", whole)).sum(0)
        return torch.split(total, list(per_share))[self.member]

    def exchange(
        self,
        own: Tensor,
        cut: tuple[int, Sequence[int]],
        joined: tuple[int, Sequence[int]],
        *,
        is_gradient: bool,
    ) -> Tensor:
        (cut_dim, cut_sizes), (dim, sizes) = cut, joined
        assert own.shape[cut_dim] == sum(cut_sizes)
        assert own.shape[dim] == sizes[self.member]
        kind = "exchange back" if is_gradient else "exchange"
        parts = self.meeting.all(self.member, kind, own)
        return torch.cat([torch.split(part, list(cut_sizes), cut_dim)[self.member] for part in parts], dim)


def in_threads(degree: int, run: Callable[[ThreadGroup], _Result]) -> tuple[list[_Result], Meeting]:
    """What every device of a group gives, and where they met."""
    meeting = Meeting(degree)
    ranks = tuple(range(degree))
    groups = [ThreadGroup(ranks, member, torch.device("cpu"), meeting=meeting) for member in ranks]

    def guarded(group: ThreadGroup) -> _Result:
        try:
            return run(group)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(degree) as pool:
        futures = [pool.submit(guarded, group) for group in groups]
        errors = [future.exception() for future in futures]
        for error in sorted(
            (e for e in errors if e), key=lambda e: isinstance(e, threading.BrokenBarrierError)
        ):
            raise error
        return [future.result() for future in futures], meeting
