"""What is left of a plan for some of its tasks, and plans of some tasks one behind the other: with times as
early as devices and inputs allow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import ceil

from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import MetaOp

# Times are whole ticks, so that no sum of floats lets two slices overlap; with a tick on top of each
# duration, as the difference of two rounded numbers may fall short of it.
_TICKS_PER_S = 10**12


def restricted(
    slices: Sequence[Slice], tasks: Collection[str], by_name: Mapping[str, MetaOp]
) -> tuple[Slice, ...]:
    """The slices of some tasks on the devices that they have, in their order, without waiting for others."""
    return as_early_as_possible(
        [slice_ for slice_ in slices if by_name[slice_.metaop].task in tasks], by_name
    )


def as_early_as_possible(slices: Sequence[Slice], by_name: Mapping[str, MetaOp]) -> tuple[Slice, ...]:
    """Slices with other times: in this order, producers first, each when its devices are free and its inputs
    and the slices of its MetaOp before it have ended.
    """
    device_free: dict[int, int] = {}
    ended: dict[str, int] = {}
    timed: list[tuple[int, Slice]] = []
    for slice_ in slices:
        inputs = (ended.get(name, 0) for name in by_name[slice_.metaop].inputs)
        devices = (device_free.get(device, 0) for device in slice_.devices)
        start = max(0, ended.get(slice_.metaop, 0), *inputs, *devices)
        end = start + ceil((slice_.end_s - slice_.start_s) * _TICKS_PER_S) + 1
        ended[slice_.metaop] = end
        device_free.update(dict.fromkeys(slice_.devices, end))
        times = {"start_s": start / _TICKS_PER_S, "end_s": end / _TICKS_PER_S}
        timed.append((start, slice_.model_copy(update=times)))
    timed.sort(key=lambda item: item[0])
    return tuple(slice_ for _, slice_ in timed)
