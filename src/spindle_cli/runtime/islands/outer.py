"""An outer step: how far the islands have moved on average is the gradient of an outer optimizer.

    d   = common - parameters             of each island, rounded where fewer bits are sent
    g   = mean of d over the islands, each with the same weight
    m   = momentum * m + g                torch.optim.SGD's, with no dampening, from m = 0
    common = common - lr * (g + momentum * m), or with m alone in place of the sum where it is not Nesterov's
    parameters = common

on every island alike, bit for bit: all add up the same numbers in the same order. Each rank does it for
what its own optimizers step. The inner optimizers keep their state, as in DiLoCo (arXiv 2311.08105).

Numbers in fewer bits, for slow links, are whole multiples of a scale that each parameter has. The scale
is the parameter's largest number over the largest multiple, of the whole parameter, whichever ranks have
parts of it: so what is sent, and what is trained, is the same under every plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spindle_cli.checkpoint.index import COMMON_KEY, OUTER_MOMENTUM_KEY
from spindle_cli.errors import RunFailedError
from spindle_cli.files.tensors import parse_key
from spindle_cli.runtime.islands.peer_replicas import PeerReplicas
from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.workload.settings.types import LocalSgd

# Elements that are sent at once: 16 MiB in float32.
SENT_AT_ONCE = 2**22


@dataclass(frozen=True)
class _Kept:
    """What is kept of an owned range between outer steps. `momentum`: None where there is none."""

    owned: OwnedRange
    common: Tensor
    momentum: Tensor | None


class OuterOptimizer:
    """One rank's."""

    def __init__(
        self,
        settings: LocalSgd,
        owned_ranges: Sequence[OwnedRange],
        names: Sequence[str],
        peer_replicas: PeerReplicas,
    ) -> None:
        """`owned_ranges`: all that this rank steps. `names`: of all trained parameters, the same on every
        rank.
        """
        self._settings = settings
        self._peer_replicas = peer_replicas
        self._place = {name: place for place, name in enumerate(names)}
        has_momentum = settings.outer.momentum > 0
        self._kept = [
            _Kept(
                owned,
                owned.tensor.detach().clone(),
                torch.zeros_like(owned.tensor.detach()) if has_momentum else None,
            )
            for owned in owned_ranges
        ]
        self._by_range = {(entry.owned.name, entry.owned.part): entry for entry in self._kept}
        self._resumed: set[tuple[str, tuple[int, int] | None]] = set()

    def begin(self) -> None:
        """The common point is that of the checkpoint, or else where the parameters are now; collective.

        Raises:
            RunFailedError: islands do not begin at the same one.
        """
        for key, entry in self._by_range.items():
            if key not in self._resumed:
                entry.common.copy_(entry.owned.tensor.detach())
        sums = [entry.common.double().sum() for entry in self._kept]
        local = torch.stack(sums).cpu() if sums else torch.zeros(1, dtype=torch.float64)
        for number, peer in enumerate(self._peer_replicas.gather(local)):
            different = [place for place, same in enumerate((local == peer).tolist()) if not same]
            if different:
                name = self._kept[different[0]].owned.name
                raise RunFailedError(
                    f"{name}: island {number} begins with other values of it than island "
                    f"{self._peer_replicas.island.number}",
                    hint="Initial values have to follow from the seed alone, and be the same on every node.",
                )

    def state_of(self, owned: OwnedRange) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint has of an owned range, by its keys."""
        kept = self._by_range[owned.name, owned.part]
        yield COMMON_KEY, kept.common
        if kept.momentum is not None:
            yield OUTER_MOMENTUM_KEY, kept.momentum

    def resume(self, owned: OwnedRange, saved: Mapping[str, Tensor]) -> None:
        """Go on from what a checkpoint has, in place of what there is."""
        kept = self._by_range[owned.name, owned.part]
        if COMMON_KEY in saved:
            kept.common.copy_(saved[COMMON_KEY])
            self._resumed.add((owned.name, owned.part))
        if kept.momentum is not None and OUTER_MOMENTUM_KEY in saved:
            kept.momentum.copy_(saved[OUTER_MOMENTUM_KEY])

    def step(self) -> None:
        """Bring the islands together; collective. Only what this rank steps is new then."""
        scales = self._scales()
        for some in _at_once(self._kept):
            moved = [entry.common - entry.owned.tensor.detach() for entry in some]
            own_scales = None if scales is None else scales[self._places(some)]
            means = self._mean(torch.cat([difference.reshape(-1) for difference in moved]), some, own_scales)
            parts = torch.split(means, [difference.numel() for difference in moved])
            for entry, mean in zip(some, parts, strict=True):
                self._step_range(entry, mean.view_as(entry.common))

    def _places(self, some: Sequence[_Kept]) -> Tensor:
        places = [self._place[parse_key(entry.owned.name)[0]] for entry in some]
        return torch.tensor(places, device=some[0].common.device)

    def _scales(self) -> Tensor | None:
        """The scales of all parameters, as this island rounds them; None where it does not."""
        if not self._settings.is_rounded:
            return None
        device = self._kept[0].common.device if self._kept else torch.device("cpu")
        largest = torch.zeros(len(self._place), dtype=torch.float64, device=device)
        for entry in self._kept:
            place = self._place[parse_key(entry.owned.name)[0]]
            moved = (entry.common - entry.owned.tensor.detach()).abs().amax().double()
            largest[place] = torch.maximum(largest[place], moved)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return scales_of(largest, self._settings.bits)

    def _mean(self, moved: Tensor, some: Sequence[_Kept], scales: Tensor | None) -> Tensor:
        """Over the islands, flat. `scales`: of each of these owned ranges; None: nothing is rounded."""
        if scales is None:
            total = _added(self._peer_replicas.gather(moved))
        else:
            sizes = [entry.common.numel() for entry in some]
            multiples = self._peer_replicas.gather(
                rounded(moved.double(), spread(scales, sizes), self._settings.bits)
            )
            of_all = self._peer_replicas.gather(scales)
            total = _added(
                [
                    multiple.double() * spread(island_scales, sizes)
                    for multiple, island_scales in zip(multiples, of_all, strict=True)
                ]
            )
        return (total / self._peer_replicas.island.count).to(moved.dtype)

    def _step_range(self, kept: _Kept, gradient: Tensor) -> None:
        outer = self._settings.outer
        if kept.momentum is None:
            direction = gradient
        else:
            kept.momentum.mul_(outer.momentum).add_(gradient)
            direction = kept.momentum
            if outer.nesterov:
                direction = gradient.add(kept.momentum, alpha=outer.momentum)
        kept.common.add_(direction, alpha=-outer.lr)
        kept.owned.tensor.detach().copy_(kept.common)


def _added(values: Sequence[Tensor]) -> Tensor:
    """Adds values up in their order, so that every island comes to the same sum."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def _at_once(kept: Sequence[_Kept]) -> Iterator[list[_Kept]]:
    """Those that follow each other and have one dtype, so many elements together; one alone may have more."""
    some: list[_Kept] = []
    size = 0
    for entry in kept:
        is_other = bool(some) and some[0].common.dtype != entry.common.dtype
        if some and (is_other or size + entry.common.numel() > SENT_AT_ONCE):
            yield some
            some, size = [], 0
        some.append(entry)
        size += entry.common.numel()
    if some:
        yield some


_TYPES = {16: torch.int16, 8: torch.int8}


def largest_multiple(bits: int) -> int:
    """The largest multiple of the scale that so many bits hold."""
    return (1 << (bits - 1)) - 1


def scales_of(largest: Tensor, bits: int) -> Tensor:
    """From the largest absolute value of each parameter; where all are 0, any does."""
    return torch.where(largest > 0, largest / largest_multiple(bits), torch.ones_like(largest))


def rounded(values: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The nearest multiples, halves to the even one.

    Args:
        values: flat.
        scales: of each value.
    """
    most = largest_multiple(bits)
    return (values / scales).round().clamp(-most, most).to(_TYPES[bits])


def spread(scales: Tensor, sizes: Sequence[int]) -> Tensor:
    """The scale of each value: of ranges of these sizes that follow each other."""
    return scales.repeat_interleave(torch.tensor(sizes, device=scales.device))
