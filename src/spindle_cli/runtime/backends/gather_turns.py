"""Gathers of what was updated take turns on a GPU, whatever their communicators.

Collectives of several communicators run side by side there, as kernels find room, and share the links: what
the first slices need would be there as late as what the last ones do. On CPUs gloo starts each at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from spindle_cli.runtime.backends.side_stream import SideStream


class GatherTurns:
    """A stream on which each gather that is started waits for the one before; compute does not."""

    def __init__(self, device: torch.device) -> None:
        self._side = SideStream(device)

    def take(self, start: Callable[[], dist.Work]) -> dist.Work:
        """Start a gather behind what the device has computed so far, and behind the gather before.

        `start` takes no memory that a later operation of the device might be given while it still runs.
        """
        with self._side.behind_compute():
            work = start()
            if self._side.is_apart:
                work.wait()  # of the stream, not of the host
        return work
