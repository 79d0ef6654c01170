"""A GPU's stream beside the one that computes, for a collective that waits for another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """On a GPU, what is waited for inside of `behind_compute` holds up neither the host nor what the device
    computes. On a CPU the host waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream(device) if device.type == "cuda" else None

    @property
    def is_apart(self) -> bool:
        """Say whether there is a stream beside the one that computes."""
        return self._stream is not None

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        """What is started in here comes behind what the device has computed so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
