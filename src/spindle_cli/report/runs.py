"""Devices in runs: neighbours that are alike are told, and drawn, once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TypeVar

from spindle_cli.report.types import DeviceRun

T = TypeVar("T")


def runs_of(devices: Iterable[int]) -> tuple[DeviceRun, ...]:
    """Ascending runs [first, last] of consecutive numbers: {5, 0, 1, 2} -> ((0, 2), (5, 5))."""
    runs: list[DeviceRun] = []
    for device in sorted(set(devices)):
        if runs and runs[-1][1] == device - 1:
            runs[-1] = (runs[-1][0], device)
        else:
            runs.append((device, device))
    return tuple(runs)


def equal_runs(values: Sequence[T]) -> tuple[tuple[DeviceRun, T], ...]:
    """Runs of devices with equal values, of one value per device."""
    runs: list[tuple[DeviceRun, T]] = []
    for value, members in groupby(enumerate(values), key=lambda item: item[1]):
        devices = [device for device, _ in members]
        runs.append(((devices[0], devices[-1]), value))
    return tuple(runs)
