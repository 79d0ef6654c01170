"""A feed of a workload whose tasks all run at every step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from spindle_cli.runtime.step.counting import Counting, Portion
from spindle_cli.runtime.step.data import Feed, Share
from spindle_cli.training.data.reading import BatchSource
from spindle_cli.training.sampling import Schedule, Turns


def feed_of(
    batches: Mapping[str, BatchSource],
    portions: Sequence[Portion],
    steps: range,
    dtype: torch.dtype | None = None,
    *,
    batches_per_step: int = 1,
    counting: Counting | None = None,
    all_must_count: Mapping[str, Collection[str]] | None = None,
    reads_ahead: bool = True,
) -> Feed:
    """On the CPU."""
    turns = Turns(None, batches, 0)
    return Feed(
        batches,
        {turns.names: Share(tuple(portions), counting)},
        Schedule(turns, batches_per_step),
        steps,
        torch.device("cpu"),
        dtype,
        all_must_count,
        reads_ahead,
    )
