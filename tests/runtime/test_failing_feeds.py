"""A dataset that fails ends the run at the step that needs the sample: nobody waits for what never comes."""

from __future__ import annotations

import pytest
import torch
from test_parts import make_batches

from helpers.feeds import feed_of
from spindle_cli.runtime.step.counting import Counting, Portion
from spindle_cli.runtime.step.losses import CountLayout

PORTION = Portion("t", (0, 6), ("x",))


class Failing:
    """Twenty-four samples, of which one cannot be read."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.bad:
            raise OSError("the disk is gone")
        return {"x": torch.full((1,), float(index))}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("step", [0, 1, 2, 3])
@pytest.mark.parametrize("batches_per_step", [1, 2])
def test_batches_before_a_failure_are_trained_where_losses_are_counted_ahead(
    step: int, batches_per_step: int
) -> None:
    bad = make_batches(Failing(-1))["t"].indices(step)[0]
    feed = feed_of(
        make_batches(Failing(bad)),
        (PORTION,),
        range(4 // batches_per_step),
        batches_per_step=batches_per_step,
        counting=Counting((), CountLayout({"t": slice(0, 1)}, 1)),
    )
    for number in range(4):
        if number == step:
            break
        feed.take()
        if number % batches_per_step == batches_per_step - 1:
            feed.counts(number // batches_per_step + 1)
    for _ in range(2):  # whoever asks again is told again
        with pytest.raises(OSError, match="the disk is gone"):
            feed.take()
