"""A connected worker's place in a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from spindle_cli.files.request import RunRequest, journal_path
from spindle_cli.runtime.islands.peer_replicas import PeerReplicas


@dataclass(frozen=True)
class WorkerContext:
    """A connected worker's place in a run: what is asked, which rank it is, on which device, and the first
    rank of its node. `peer_replicas`: on other islands; then ranks are those of its own.
    """

    request: RunRequest
    rank: int
    device: torch.device
    first_of_node: int = 0
    peer_replicas: PeerReplicas | None = None

    @property
    def rank_among_all(self) -> int:
        """The worker's rank among those of all islands."""
        return self.rank if self.peer_replicas is None else self.peer_replicas.island.rank_among_all

    @property
    def journal(self) -> Path:
        """The worker's journal."""
        if self.peer_replicas is not None:
            return self.peer_replicas.island.journal
        return journal_path(self.request.run_dir, self.rank)
