"""Communicators: one for each distinct set of ranks, made in the same order on every rank.

Each costs device memory (hundreds of MB per rank were seen with NCCL), so equal sets share theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist


class Communicators:
    """Process groups by their set of ranks."""

    def __init__(
        self, rank_sets: Iterable[tuple[int, ...]], timeout_s: float, *, shares_world: bool = True
    ) -> None:
        """Make them. Collective: every rank calls this with the same sets; a set of one needs none.

        `shares_world`: the set of all ranks takes torch's default group.
        """
        world = tuple(range(dist.get_world_size()))
        # None stands for torch's default group.
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {world: None} if shares_world else {}
        for ranks in sorted({tuple(sorted(ranks)) for ranks in rank_sets}):
            if len(ranks) > 1 and ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The communicator of a set of ranks, as torch.distributed's functions take it (None: all ranks)."""
        return self._groups[tuple(sorted(ranks))]
