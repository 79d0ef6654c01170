"""Parameters that are moving averages of trained ones: each rank moves those that it has.

Whoever has an average also has what it follows (`analysis/after_update.py`), with the values of the last
update. What is due behind an update is done when the averages are used next: ahead of the next step, of a
checkpoint or of an evaluation. Until then nothing else changes what they follow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.runtime.part.shards import Cut
from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.workload.graph import Following, move_towards


@dataclass(frozen=True)
class _Pair:
    """An average and what it follows. `number`: of the workload's `follows`."""

    number: int
    slow: Cut
    fast: Cut


class FollowingParameters:
    """A rank's averages."""

    def __init__(
        self, following: Sequence[Following], model: LocalModel, pool: GradientPool, first_step: int
    ) -> None:
        """`first_step`: counted from 0; what is due behind the steps before it is done."""
        self._following = tuple(following)
        self._model = model
        self._pool = pool
        self._settled = first_step
        self._fetched: Mapping[str, tuple[OwnedRange, ...]] = pool.fetched
        cuts = model.cuts.by_name
        self._pairs = [
            _Pair(number, cuts[slow], cuts[fast])
            for number, average in enumerate(self._following)
            for slow, fast in average.pairs
        ]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to move on this rank."""
        return not self._pairs

    def begin_batch(self, step: int, tasks: Collection[str], *, begins_step: bool) -> None:
        """Move what is due ahead of one of a step's batches of these tasks; with `begins_step` what is due
        ahead of a step, counted from 0, too, and first what is still due behind the one before. Collective.
        """
        if begins_step:
            self.settle(step)
        self._move(
            {
                number: average.decay_at(step)
                for number, average in enumerate(self._following)
                if average.when == "before_forward"
                if (begins_step if average.forwards_of is None else average.forwards_of in tasks)
            }
        )

    def settle(self, steps_done: int) -> None:
        """Move what is due behind the last of so many steps, unless that is done. Collective."""
        if steps_done == self._settled:
            return
        self._settled = steps_done
        self._move(
            {
                number: average.decay_at(steps_done - 1)
                for number, average in enumerate(self._following)
                if average.when == "after_update"
            }
        )

    def _move(self, decays: Mapping[int, float]) -> None:
        """Moves the averages that are due. `decays`: by their numbers."""
        due = [pair for pair in self._pairs if pair.number in decays]
        if not due:
            return
        self._pool.await_all_parameters()
        with torch.no_grad():
            for _, pairs in groupby(due, key=self._fetched_with):
                together = list(pairs)
                with self._whole([key for pair in together for key in _keys(pair.fast)]):
                    self._move_pairs(together, decays)

    def _fetched_with(self, pair: _Pair) -> object:
        """Pairs with the same of it, one behind the other, are moved while what they follow is whole once."""
        if pair.fast.count > 1:  # which other ranks may have in other buckets
            return pair.fast.name
        return self._pool.fetched_bucket(pair.fast.name)

    def _whole(self, keys: Sequence[str]) -> AbstractContextManager[object]:
        return self._pool.whole(keys) if not self._fetched.keys().isdisjoint(keys) else nullcontext()

    def _move_pairs(self, pairs: Sequence[_Pair], decays: Mapping[int, float]) -> None:
        lists: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for pair in pairs:
            averages, followed = lists.setdefault(decays[pair.number], ([], []))
            for slow, fast in self._both(pair):
                averages.append(slow)
                followed.append(fast)
        for decay, (averages, followed) in lists.items():
            move_towards(averages, followed, decay)

    def _both(self, pair: _Pair) -> Iterator[tuple[Tensor, Tensor]]:
        """What this rank has of an average, and the same elements of what it follows."""
        for index in range(pair.slow.count):
            key = pair.slow.key(index)
            if key not in self._model.parameters:
                continue
            for slow, elements in self._held(key):
                fast = self._part_of(pair, index)
                yield slow, fast if elements is None else fast.reshape(-1)[slice(*elements)]

    def _held(self, key: str) -> Iterator[tuple[Tensor, tuple[int, int] | None]]:
        """What this rank has of an average's leaf, with the elements that it is of."""
        if key not in self._fetched:
            yield self._model.parameters[key].detach(), None
        for owned in self._fetched.get(key, ()):
            yield owned.tensor.detach(), owned.part

    def _part_of(self, pair: _Pair, index: int) -> Tensor:
        """The part that a leaf of an average follows of what the average follows, which is whole here."""
        leaves = [self._model.parameters[key].detach() for key in _keys(pair.fast)]
        fast = leaves[0] if len(leaves) == 1 else torch.cat(leaves, pair.fast.dim)
        if pair.slow.count == 1:
            return fast
        first, last = pair.slow.span(index)
        return fast.narrow(pair.slow.dim, first, last - first)


def _keys(cut: Cut) -> list[str]:
    return [cut.key(index) for index in range(cut.count)]
