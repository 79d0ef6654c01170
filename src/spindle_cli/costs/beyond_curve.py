"""How much longer the ops of a slice take on its devices than their curve says: for sums and gathers over the
shares of their batch (`batch_sums.py`), and for what devices share out of parameters (`sharded.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from spindle_cli.costs.batch_sums import Summing, sums_beyond_curve_s
from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.parameters.sharded import Moved, SharedOut, moved_in_passes
from spindle_cli.costs.work import reached_by_gradients
from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.types import MetaOp


class BeyondCurve:
    """What the slices of a plan take beyond their curves, worked out once for each."""

    def __init__(self, by_name: Mapping[str, MetaOp], cluster: Cluster, step: SharedOut) -> None:
        """`step`: the plan, or the profile by which one is looked for."""
        self._by_name = by_name
        self._cluster = cluster
        self._step = step
        self._moved: dict[object, Moved | None] = {}

    def op_s(
        self, piece: SliceShape, metaop: Summing, forward_s: float, backward_s: float
    ) -> tuple[float, float]:
        """Seconds of one op of a slice on average, forward and backward.

        Args:
            metaop: the slice's.
            forward_s, backward_s: of one op by the curve, the latter on average with the former where ops
                are recomputed.
        """
        forward_more_s, backward_more_s = sums_beyond_curve_s(piece, metaop, self._cluster)
        num_ops = piece.ops[1] - piece.ops[0]
        backward_more_s += forward_more_s * piece.num_recomputed / num_ops
        moved = self._of(piece) if self._step.sharding else None
        if moved is None:
            return forward_more_s, backward_more_s
        longer = moved.longer_s(forward_s + forward_more_s, backward_s + backward_more_s)
        return forward_more_s + longer[0] / num_ops, backward_more_s + longer[1] / num_ops

    @cached_property
    def _reached(self) -> dict[str, bool]:
        return reached_by_gradients(self._by_name.values())

    def _of(self, piece: SliceShape) -> Moved | None:
        key = piece.metaop, piece.ops, piece.tp, piece.devices
        if key not in self._moved:
            of_slice = self._by_name[piece.metaop]
            is_reached = self._reached[piece.metaop]
            self._moved[key] = moved_in_passes(
                piece, of_slice, self._cluster, self._step, is_reached=is_reached
            )
        return self._moved[key]
