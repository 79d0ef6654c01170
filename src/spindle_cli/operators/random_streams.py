"""Random numbers under tensor parallelism: common to a group where its devices compute alike, own where each
computes its part.

Outside of the split part of a layer the devices of a group hold the same activations, and must draw the same
dropout masks, or they would no longer be the same. Inside of it each draws masks of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_MIX = 1_000_003
_SEEDS = 2**62


@dataclass(frozen=True)
class RandomState:
    """The state of the generators that a device's modules draw from."""

    device: torch.device
    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Takes the states of the random streams as they are now."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Put the recorded states back."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


def seed_generators(seed: int, device: torch.device) -> None:
    """As `torch.manual_seed`, which takes 0.3 ms where CUDA is not in use, for this device alone."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def draw_seed() -> int:
    """A seed for another stream, from the current one."""
    return int(torch.randint(_SEEDS, ()))


def mix(*numbers: int) -> int:
    """A seed from several numbers."""
    seed = 0
    for number in numbers:
        seed = (seed * _MIX + number + 1) % _SEEDS
    return seed


@contextmanager
def drawing_from(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw from a stream of its own inside the block; None: from the current one."""
    if seed is None:
        yield
        return
    before = RandomState.now(device)
    seed_generators(seed, device)
    try:
        yield
    finally:
        before.restore()
