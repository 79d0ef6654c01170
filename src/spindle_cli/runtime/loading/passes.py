"""A rank's side of data for evaluations that another process reads: one pass after another."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spindle_cli.runtime.loading.client import NodeBatches

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NodeBatch:
    """A batch that is there until the next one is asked for."""

    batches: NodeBatches
    number: int
    size: int

    def rows(self, first: int, last: int, fields: Collection[str]) -> Mapping[str, Tensor]:
        """Samples [first, last); of the named fields those that there are."""
        return self.batches.rows(self.number, first, last, fields)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of one sample of each field."""
        return self.batches.shapes(self.number)


class NodePasses:
    """Passes over a task's data. The process reads on meanwhile: a pass begins with what is there."""

    def __init__(self, batches: NodeBatches) -> None:
        self._batches = batches
        self._next = 0
        self._is_within = False

    def batches(self) -> Iterator[NodeBatch]:
        """Those of the next pass; what is left of one that has been left is passed over.

        Raises:
            SpindleError: one could not be loaded, or whoever loads it has died.
        """
        while self._is_within:
            self._take()
        while (batch := self._take()) is not None:
            yield batch

    def first(self) -> NodeBatch | None:
        """The first batch of the next pass, which still begins with it; None: it has none."""
        size = self._batches.size(self._next)
        return NodeBatch(self._batches, self._next, size) if size else None

    def close(self) -> None:
        """Tell the loading process that this rank takes no more batches."""
        self._batches.close()

    def _take(self) -> NodeBatch | None:
        batch = self.first()
        self._next += 1
        self._is_within = batch is not None
        return batch
