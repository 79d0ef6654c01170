"""A connected worker's place in a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from spindle_cli.files.request import RunRequest, journal_path
from spindle_cli.runtime.islands.counterparts import Counterparts


@dataclass(frozen=True)
class WorkerContext:
    """A connected worker's place in a run: what is asked, which rank it is, on which device, and the first
    rank of its node. `counterparts`: on other islands; then ranks are those of its own.
    """

    request: RunRequest
    rank: int
    device: torch.device
    first_of_node: int = 0
    counterparts: Counterparts | None = None

    @property
    def rank_among_all(self) -> int:
        """The worker's rank among those of all islands."""
        return self.rank if self.counterparts is None else self.counterparts.island.rank_among_all

    @property
    def journal(self) -> Path:
        """The worker's journal."""
        if self.counterparts is not None:
            return self.counterparts.island.journal
        return journal_path(self.request.run_dir, self.rank)
