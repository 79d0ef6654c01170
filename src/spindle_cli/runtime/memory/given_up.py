"""Tensors whose storage is there, but not its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def give_up_memory(flat: Tensor) -> None:
    """Let go of a tensor's memory, and of that of its views, but not of its storage."""
    flat.untyped_storage().resize_(0)


def take_back_memory(flat: Tensor) -> None:
    """Give a flat tensor memory again, with any values."""
    flat.untyped_storage().resize_(flat.numel() * flat.itemsize)
