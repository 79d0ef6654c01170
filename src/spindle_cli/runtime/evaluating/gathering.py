"""What forward returns for each sample, from the ranks that have it to rank 0, in the samples' order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.runtime.communication.rows import Samples, share_shape
from spindle_cli.runtime.communication.wiring import Wiring
from spindle_cli.runtime.evaluating.passes import BatchRun, present
from spindle_cli.workload.graph import TaskGraph, ValueSpec
from spindle_cli.workload.training.precision import dtype_in

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _Piece:
    """Rows of a result, and the rank that hands them in."""

    key: str
    spec: ValueSpec
    samples: Samples
    owner: int


class Results:
    """Rank 0 gathers them batch by batch, into its host's memory."""

    def __init__(self, task: TaskGraph, wiring: Wiring, rank: int, dtype: torch.dtype | None) -> None:
        """`dtype`: that everything floating-point was converted to, if it was."""
        self._rank = rank
        self._rows: dict[str, list[Tensor]] = {key: [] for key in task.results}
        self._pieces: list[_Piece] = []
        for wired in wiring.slices:
            for key in (
                key for op in wired.ops for key in op.results if wired.task.task.name == task.task.name
            ):
                spec = task.results[key]
                spec = replace(spec, dtype=dtype_in(spec.dtype, dtype))
                self._pieces += [
                    _Piece(key, spec, wired.layout.rows(share), wired.layout.holders(share)[0])
                    for share in range(wired.layout.dp)
                ]
        self._pieces.sort(key=lambda piece: piece.samples)  # micro-batches may run in another order

    def gather(self, batch: BatchRun, size: int) -> None:
        """Hand in those of a batch of `size` samples; collective."""
        for piece in self._pieces:
            there = present(piece.samples, size)
            if there[0] == there[1]:
                continue
            mine = batch.results.get((piece.key, there)) if piece.owner == self._rank else None
            if mine is not None:
                mine = mine.detach().to(piece.spec.dtype).contiguous().cpu()
            if piece.owner != 0:
                mine = self._moved(piece, there, mine)
            if self._rank == 0:
                assert mine is not None, "it has arrived"
                self._rows[piece.key].append(mine)

    def _moved(self, piece: _Piece, there: Samples, mine: Tensor | None) -> Tensor | None:
        if mine is not None:
            dist.send(mine, 0, group=host_group())
        elif self._rank == 0:
            mine = torch.empty(share_shape(piece.spec, there), dtype=piece.spec.dtype)
            dist.recv(mine, piece.owner, group=host_group())
        return mine

    def whole(self) -> dict[str, Tensor]:
        """All samples' rows by key, on rank 0."""
        return {key: torch.cat(rows) for key, rows in self._rows.items() if rows}
