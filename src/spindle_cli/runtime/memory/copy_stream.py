"""A GPU's stream to copy on, beside the one that computes.

What is copied is ordered by events alone. Memory that is copied into is taken by the stream that computes, so
that whatever it takes later is behind all that uses it: memory taken by the copying stream would be given
away before what computes has read it (pytorch/pytorch issue 106360, pytorch/torchtune issue 1867), unless it
is recorded there, and is then given back late.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class CopyStream:
    """On a GPU, what copies without holding up the host or what is computed. On a CPU copies are made at
    once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # with its index, as tensors have it
        self._stream = _stream(self._device) if device.type == "cuda" else None

    @property
    def is_apart(self) -> bool:
        """Say whether there is a stream beside the one that computes."""
        return self._stream is not None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Start to copy the second of each pair into the first, behind all that is computed by now; gives an
        event that has happened when that is done. None: it is done.
        """
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            copied = _event()
            copied.record(self._stream)
        return copied

    def await_copy(self, copied: torch.cuda.Event | None) -> None:
        """Let what is computed next wait for a copy."""
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
