"""How much of their forward passes ops compute again, backward, and what they keep for that."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from spindle_cli.costs.memory import SliceShape, inner_bytes
from spindle_cli.profile.types import MetaOp


class _Recomputed(Protocol):
    @property
    def recompute(self) -> bool: ...
    @property
    def selective(self) -> bool: ...


class Again(Enum):
    """What ops run again of their forward passes, backward."""

    NOTHING = "nothing"
    SELECTIVE = "selective"  # all but what takes longest, which is kept
    ALL = "all"

    @classmethod
    def of(cls, piece: _Recomputed) -> Again:
        """Those of a slice, or on an allocation, but for such whose activations are in host memory."""
        if not piece.recompute:
            return cls.NOTHING
        return cls.SELECTIVE if piece.selective else cls.ALL


class _Recomputable(Protocol):
    @property
    def selective_share(self) -> float | None: ...


def share_again(metaop: _Recomputable, *, selective: bool) -> float:
    """The share of an op's forward pass that runs once more where it is recomputed: all of it; or as much as
    the profile says, where what takes longest is kept.
    """
    return 1.0 if not selective or metaop.selective_share is None else metaop.selective_share


def forwards_again(piece: SliceShape, metaop: _Recomputable) -> float:
    """How many forward passes of one op the backward passes of all of a slice's ops compute again."""
    return piece.num_recomputed * share_again(metaop, selective=piece.selective)


def saved_bytes(metaop: MetaOp) -> int:
    """The bytes that an op need not keep for the whole batch, on average, where it is recomputed."""
    return max(0, metaop.activation_bytes_per_op - inner_bytes(metaop))


def selectively_saved_bytes(metaop: MetaOp) -> int:
    """The bytes that an op need not keep for the whole batch, on average, where all but what takes longest is
    recomputed; 0 where that is not known.
    """
    if metaop.selective_share is None:
        return 0
    entries = [entry for entry in metaop.memory if entry.tp == 1]
    ends = [*(entry.first_op for entry in entries[1:]), metaop.num_ops]
    saved = 0
    for entry, end in zip(entries, ends, strict=True):
        kept = entry.kept_bytes[1] if entry.selective_bytes is None else entry.selective_bytes[1]
        saved += (end - entry.first_op) * (entry.kept_bytes[1] - kept)
    return max(0, min(round(saved / metaop.num_ops), saved_bytes(metaop)))
