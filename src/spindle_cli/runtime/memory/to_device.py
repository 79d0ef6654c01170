"""From the host's memory to the device's, without waiting for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor in memory that the device can copy from by itself; on a CPU that is any memory."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def on_its_way(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, once the device comes to it. torch keeps the pinned memory until then."""
    return pinned(tensor, device).to(device, non_blocking=True)
