"""What this rank's shares of the losses count of each batch, known before its step begins.

Who loads a batch counts it; what all ranks count is summed with the losses of the step before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spindle_cli.analysis.losses.counts import LossCounter, share_of_samples
from spindle_cli.runtime.communication.rows import Samples

if TYPE_CHECKING:
    from torch import Tensor

    from spindle_cli.runtime.step.compute import LocalSlice
    from spindle_cli.runtime.step.losses import CountLayout


@dataclass(frozen=True)
class Portion:
    """The samples of one task's batch that this rank loads, and the fields that it keeps of them."""

    task: str
    samples: Samples
    fields: tuple[str, ...]


def rows_of(
    loaded: Mapping[Portion, Mapping[str, Tensor]], task: str, samples: Samples, names: Sequence[str]
) -> dict[str, Tensor] | None:
    """Views of the rows of `samples` of a task's fields, in what was loaded; None where they were not."""
    for portion, tensors in loaded.items():
        first, last = portion.samples
        if portion.task == task and first <= samples[0] and samples[1] <= last:
            return {name: tensors[name][samples[0] - first : samples[1] - first] for name in names}
    return None


@dataclass(frozen=True)
class CountedShare:
    """A share of a task's loss that this rank counts for; `rows`: of the vector of all counts."""

    task: str
    samples: Samples
    share: float
    counter: LossCounter
    rows: slice


def counted_shares(
    slices: Iterable[LocalSlice], layout: CountLayout, batches_per_step: int
) -> tuple[CountedShare, ...]:
    """The shares of losses that count something and that this rank speaks for."""
    counted = []
    for local in slices:
        shares, task = local.wired.loss_shares, local.wired.task
        if shares is None or shares.num_counts == 0 or not speaks_for_loss(local):
            continue
        first, last = local.samples
        share = share_of_samples(last - first, task.task.batch_size, batches_per_step)
        counter = LossCounter(task.root, shares)
        counted.append(
            CountedShare(task.task.name, local.samples, share, counter, layout.rows[task.task.name])
        )
    return tuple(counted)


def labels_that_must_count(slices: Iterable[LocalSlice], batches_per_step: int) -> dict[str, tuple[str, ...]]:
    """By task, the fields in which no label may be ignored, as an operator's own mean over them is split."""
    return {
        local.wired.task.task.name: shares.all_must_count
        for local in slices
        if (shares := local.wired.loss_shares) is not None
        and (batches_per_step > 1 or local.samples != (0, local.wired.task.task.batch_size))
    }


def speaks_for_loss(local: LocalSlice) -> bool:
    """Whether this rank counts for a share of a loss that a slice holds."""
    return local.wired.loss_shares is not None and local.is_first


class Counting:
    """Counts batches for the shares of losses that this rank speaks for."""

    def __init__(self, shares: Sequence[CountedShare], layout: CountLayout) -> None:
        self._shares = tuple(shares)
        self._size = layout.size

    @property
    def nothing(self) -> Tensor:
        """What nothing counts: float64, one row for each count of any task's loss."""
        return torch.zeros(self._size, dtype=torch.float64)

    def count(
        self,
        loaded: Mapping[Portion, Mapping[str, Tensor]],
        counters: Mapping[str, LossCounter | None] | None = None,
    ) -> Tensor:
        """What this rank's shares count in portions of a batch, as the dataset gives them; like `nothing`.

        `counters`: by task, in place of those of the planned lengths.
        """
        counts = self.nothing
        for share in self._shares:
            counter = (counters or {}).get(share.task) or share.counter
            fields = rows_of(loaded, share.task, share.samples, counter.fields)
            if fields is not None:
                counts[share.rows] += counter.count(fields, share.share)
        return counts
