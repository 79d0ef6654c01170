"""In which order devices run the passes of slices that say when they run backward."""

from __future__ import annotations

from collections.abc import Sequence

from spindle_cli.account.types import Pass
from spindle_cli.costs.memory import SliceShape


def passes_by_device(slices: Sequence[SliceShape], num_devices: int) -> list[list[Pass]] | None:
    """Of each device its passes, where slices, which are in order of start, say when they run backward."""
    order = _own_order(slices)
    if order is None:
        return None
    passes: list[list[Pass]] = [[] for _ in range(num_devices)]
    for each in order:
        for device in slices[each.piece].devices:
            passes[device].append(each)
    return passes


def _own_order(slices: Sequence[SliceShape]) -> list[Pass] | None:
    """All passes by their starts, where slices, which are in order of start, say when they run backward."""
    if all(piece.backward_start_s is None for piece in slices):
        return None
    starts: list[tuple[float, int, int]] = []
    for index, piece in enumerate(slices):
        starts.append((piece.start_s, 0, index))
        # Of what takes no time and starts together, what is later forward comes first backward.
        backward_s = piece.start_s if piece.backward_start_s is None else piece.backward_start_s
        starts.append((backward_s, 1, -index))
    return [Pass(abs(index), is_backward == 1) for _, is_backward, index in sorted(starts)]
