"""A plan's schedule as a grid, plain data: rows of devices, columns of time, the slice in each cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from spindle_cli.plan.types import Plan

SHORTEST_S = 1e-12  # a schedule that is not longer counts as taking no time at all


@dataclass(frozen=True)
class Row:
    """One line of the picture.

    Attributes:
        devices: that it stands for, ascending.
        exact: all of them run exactly these slices; otherwise the cells show what most of them run.
        cells: index into `plan.slices` per column, None where the devices are idle.
        backward: the columns in which what runs is a backward pass, where the plan tells passes apart.
        used: share of the schedule in which the devices are busy, their mean, 0 to 1.
    """

    devices: tuple[int, ...]
    exact: bool
    cells: tuple[int | None, ...]
    used: float
    backward: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Grid:
    """The picture: `columns` columns of `column_s` seconds each."""

    rows: tuple[Row, ...]
    columns: int
    column_s: float


def length_s(plan: Plan) -> float:
    """Seconds that the schedule takes; 1 for one that takes none, so that shares of it can be told.

    Starts count too, so that a plan that no check would pass can be drawn.
    """
    last_s = max(
        max(
            wave.start_s,
            *(time_s for slice_ in wave.slices for times_s in slice_.times_s for time_s in times_s),
        )
        for wave in plan.waves
    )
    return last_s if last_s > SHORTEST_S else 1.0


def make_grid(plan: Plan, columns: int, max_rows: int) -> Grid:
    """Return the schedule in `columns` columns and at most `max_rows` rows.

    Devices that run the same slices share a row. Where that leaves more than `max_rows`, neighbouring rows
    are merged into rows of about equally many devices, each cell showing the slice that runs for most of its
    device-seconds.
    """
    column_s = length_s(plan) / columns
    alike = _devices_alike(plan)
    merged = _merge(alike, max_rows, plan.cluster.num_devices)
    rows = tuple(_row(plan, groups, columns, column_s) for groups in merged)
    return Grid(rows, columns, column_s)


Alike = tuple[tuple[int, ...], tuple[int, ...]]  # devices, and the slices that each of them runs


def _devices_alike(plan: Plan) -> list[Alike]:
    """Devices grouped by what they run, ordered by their first device."""
    runs: list[list[int]] = [[] for _ in range(plan.cluster.num_devices)]
    for index, slice_ in enumerate(plan.slices):
        for device in slice_.devices:
            runs[device].append(index)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for device, slices in enumerate(runs):
        groups[tuple(slices)].append(device)
    return [(tuple(devices), slices) for slices, devices in groups.items()]


def _merge(alike: Sequence[Alike], max_rows: int, num_devices: int) -> list[list[Alike]]:
    """Neighbouring groups gathered into at most `max_rows` rows of about equally many devices."""
    if len(alike) <= max_rows:
        return [[group] for group in alike]
    rows: list[list[Alike]] = [[] for _ in range(max_rows)]
    before = 0
    for group in alike:
        rows[before * max_rows // num_devices].append(group)
        before += len(group[0])
    return [row for row in rows if row]


def _row(plan: Plan, groups: Sequence[Alike], columns: int, column_s: float) -> Row:
    devices = tuple(sorted(device for members, _ in groups for device in members))
    busy_s = sum(len(members) * plan.slices[index].busy_s for members, slices in groups for index in slices)
    shares = _device_seconds(plan, groups, columns, column_s)
    winners = [_winner(share, len(devices) * column_s) for share in shares]
    used = busy_s / (len(devices) * columns * column_s)
    cells = tuple(None if winner is None else winner[0] for winner in winners)
    backward = frozenset(column for column, winner in enumerate(winners) if winner is not None and winner[1])
    return Row(devices, len(groups) == 1, cells, used, backward)


_Pass = tuple[int, int]  # a slice, and 1 for its backward pass where that is told apart


def _device_seconds(
    plan: Plan, groups: Sequence[Alike], columns: int, column_s: float
) -> list[dict[_Pass, float]]:
    """Return, for each column, the device-seconds of each slice's pass in it."""
    shares: list[dict[_Pass, float]] = [defaultdict(float) for _ in range(columns)]
    for members, slices in groups:
        for index in slices:
            for is_backward, (start_s, end_s) in enumerate(plan.slices[index].times_s):
                first = min(int(start_s / column_s), columns - 1)
                for column in range(first, min(int(end_s / column_s) + 1, columns)):
                    overlap_s = min(end_s, (column + 1) * column_s) - max(start_s, column * column_s)
                    if overlap_s > 0:
                        shares[column][index, is_backward] += len(members) * overlap_s
    return shares


def _winner(share: dict[_Pass, float], cell_s: float) -> _Pass | None:
    """Return the slice with most device-seconds of a cell of `cell_s`, if it has more than idleness."""
    if not share:
        return None
    best = max(share, key=lambda slice_pass: (share[slice_pass], -slice_pass[0], -slice_pass[1]))
    idle_s = cell_s - sum(share.values())
    return best if share[best] >= idle_s else None
