"""Batches copied beside compute, one ahead, are the batches that were loaded."""

from __future__ import annotations

import pytest
import torch

from spindle_cli.runtime.step.counting import Portion
from spindle_cli.runtime.step.data import BatchCopies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

PORTION = Portion("t", (0, 4), ("x",))
SIZE, BATCHES = 2**22, 12


def test_batches_copied_ahead_have_their_numbers() -> None:
    """Beside matrix products that take the device longer than the host to order them."""
    device = torch.device("cuda", 0)
    copies, busy = BatchCopies(device), torch.randn(2048, 2048, device=device)
    loaded = [{PORTION: {"x": torch.full((4, SIZE), float(n)).pin_memory()}} for n in range(BATCHES)]
    found = []
    for number, batch in enumerate(loaded):
        there = copies.of(number, batch)[PORTION]["x"]
        if number + 1 < BATCHES:
            copies.begin(number + 1, loaded[number + 1])
        for _ in range(8):
            busy = busy @ busy / 2048.0
        found.append((there.amin() + 0 * busy.sum(), there.amax()))
        there.fill_(-1.0)  # its memory is the next one's but one
        del there
    copies.close()
    assert [(least.item(), most.item()) for least, most in found] == [(n, n) for n in range(BATCHES)]
