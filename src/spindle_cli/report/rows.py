"""Rows for a schedule that is drawn by task or by component instead of by device.

A slice takes as many rows as it has devices. Each band gets as many rows as keep its slices from
overlapping.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spindle_cli.plan.types import Plan, Slice
from spindle_cli.report.types import Band


@dataclass(frozen=True)
class Rows:
    """The bands, from top to bottom, and the first row of each slice (by its index in the plan)."""

    bands: tuple[Band, ...]
    row_of: tuple[int, ...]


def rows_by(plan: Plan, band_of: Mapping[str, str]) -> Rows:
    """Bands in the order of the plan's MetaOps. `band_of`: the band of each MetaOp, by its name."""
    members: dict[str, list[int]] = {band_of[metaop.name]: [] for metaop in plan.metaops}
    for index, piece in enumerate(plan.slices):
        members[band_of[piece.metaop]].append(index)
    row_of = [0] * len(plan.slices)
    bands: list[Band] = []
    first_row = 0
    for name, indices in members.items():
        offsets = _pack([plan.slices[index] for index in indices])
        num_rows = 0
        for index, offset in zip(indices, offsets, strict=True):
            row_of[index] = first_row + offset
            num_rows = max(num_rows, offset + len(plan.slices[index].devices))
        if num_rows:
            bands.append(Band(name=name, first_row=first_row, num_rows=num_rows))
            first_row += num_rows
    return Rows(tuple(bands), tuple(row_of))


def _pack(slices: Sequence[Slice]) -> list[int]:
    """Offset of each slice: the lowest that is free while it runs, and its MetaOp's last one if that is."""
    offsets = [0] * len(slices)
    placed: list[int] = []
    last_of: dict[str, int] = defaultdict(int)
    for index in sorted(range(len(slices)), key=lambda i: (slices[i].start_s, -len(slices[i].devices), i)):
        piece = slices[index]
        beside = [other for other in placed if _overlap(slices[other], piece)]
        taken = sorted((offsets[other], offsets[other] + len(slices[other].devices)) for other in beside)
        height = len(piece.devices)
        wanted = last_of[piece.metaop]
        is_free = all(end <= wanted or wanted + height <= start for start, end in taken)
        offsets[index] = wanted if is_free else _lowest_gap(taken, height)
        last_of[piece.metaop] = offsets[index]
        placed = [other for other in placed if slices[other].last_s > piece.start_s] + [index]
    return offsets


def _overlap(one: Slice, other: Slice) -> bool:
    """Whether any of their passes do."""
    return any(
        start_s < until_s and since_s < end_s
        for start_s, end_s in one.times_s
        for since_s, until_s in other.times_s
    )


def _lowest_gap(taken: Sequence[tuple[int, int]], height: int) -> int:
    """The lowest offset with `height` free rows; `taken`: ascending [start, end) of those that are not."""
    offset = 0
    for start, end in taken:
        if start - offset >= height:
            return offset
        offset = max(offset, end)
    return offset
