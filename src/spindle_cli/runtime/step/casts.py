"""Weights that autocast has cast to fewer bits, kept from one forward pass of a batch to the next.

Autocast keeps them as long as it is on. It is on in forward passes alone, which a backward pass may follow at
once; so it would cast the same weights again for every micro-batch, and for every slice that shares them.

A backward pass comes to what was made first at last: to a cast that an earlier pass has made behind all of
its own ops. So a pass whose ops are to have their gradients as soon as each is through casts anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn
from torch.nn import functional

from spindle_cli.runtime.step.compute import LocalSlice


class CastWeights:
    """The weights that one rank's program has cast. They are kept while forward passes are to come that use
    the same weights.

    Where memory is short enough that ops give something up (activations that are made again or moved, shared
    out parameters), and where an operator changes its weights, every pass casts for itself.
    """

    def __init__(self, order: Sequence[int], slices: Mapping[int, LocalSlice], *, keeps: bool) -> None:
        """`order`: of the slices whose forward passes a batch runs. `keeps`: whether autocast is on in them,
        and no pass gathers parameters or sums gradients itself.
        """
        local_slices = [slices[index] for index in order]
        self._keeps = keeps and not any(map(_gives_up, local_slices)) and keeps_gradients()
        self._lets_go = frozenset(_last_of_their_weights(order, local_slices)) if self._keeps else frozenset()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A batch is run inside; outside of forward passes autocast stays off."""
        if not self._keeps:
            yield
            return
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()

    def renew(self) -> None:
        """The gradients of the pass that begins are to be complete op by op."""
        if self._keeps:
            torch.clear_autocast_cache()

    def ran(self, slice_index: int) -> None:
        """Let go of cast weights that no later forward pass uses, once a slice has run forward."""
        if slice_index in self._lets_go:
            torch.clear_autocast_cache()


@cache
def keeps_gradients() -> bool:
    """Whether a weight that was cast where no gradients are wanted has its gradient afterwards: older
    versions of torch take the cast without one for later passes, too.
    """
    weight, x = nn.Parameter(torch.zeros(1, 1)), torch.zeros(1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            functional.linear(x, weight)
        return functional.linear(x, weight).requires_grad


def _gives_up(local: LocalSlice) -> bool:
    slice_ = local.wired.slice
    return bool(slice_.recompute or slice_.offload) or any(op.changes for op in local.wired.ops)


def _last_of_their_weights(order: Sequence[int], slices: Sequence[LocalSlice]) -> Iterator[int]:
    """The slices behind which no forward pass uses any of their weights."""
    later: set[int] = set()
    for index, local in zip(reversed(order), reversed(slices), strict=True):
        weights = {id(weight) for module in local.modules for weight in module.parameters()}
        if later.isdisjoint(weights):
            yield index
        later |= weights
