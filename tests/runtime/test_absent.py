"""A callback that reads a parameter which is shared out is told so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from spindle_cli.errors import RunFailedError
from spindle_cli.runtime.following.callback import Callback
from spindle_cli.runtime.following.calls import Callbacks
from spindle_cli.runtime.memory.given_up import give_up_memory, take_back_memory


class Reading(Callback):
    """Reads a weight at the end."""

    def __init__(self, weight: Tensor, read: Callable[[Tensor], object]) -> None:
        self.weight, self.read, self.found = weight, read, None

    def at_end(self) -> None:
        self.found = self.read(self.weight)


READS = [
    lambda weight: weight.norm(),
    lambda weight: weight.data.tolist(),
    lambda weight: torch.stack([weight, weight]),
    lambda weight: weight.detach().numpy(),
    lambda weight: repr(weight),
    lambda weight: weight[0] + 1,
]


@pytest.mark.parametrize("read", READS)
def test_reading_it_is_refused_until_it_is_there(read: Callable[[Tensor], object]) -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    give_up_memory(weight.detach())
    callback = Reading(weight, read)
    expected = r"Reading failed in at_end .*a parameter of shape \[2, 3\] is read that devices share out"
    with pytest.raises(RunFailedError, match=expected):
        Callbacks([callback], 0).at_end()
    take_back_memory(weight.detach())
    Callbacks([callback], 0).at_end()
    assert callback.found is not None


def test_what_is_known_of_it_without_its_values_may_be_asked() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    give_up_memory(weight.detach())
    callback = Reading(weight, lambda weight: (weight.shape, weight.numel(), weight.dtype, weight.grad))
    Callbacks([callback], 0).at_end()
    assert callback.found == ((2, 3), 6, torch.float32, None)
