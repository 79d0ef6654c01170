"""The C library's allocator, set for processes that train on a CPU."""

from __future__ import annotations

import ctypes
import sys

from spindle_cli.units import MIB

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_INT = 2**31 - 1
# The most that every glibc accepts (mallopt(3)); by itself it grows up to this as well.
_MMAP_THRESHOLD_BYTES = 32 * MIB


def keep_freed_memory() -> None:
    """Let the allocator keep what is freed for the next step, which needs as much again; glibc only.

    Otherwise it hands memory back to the kernel at the end of every backward pass, and gets it again page by
    page: 3 % to 5 % of an iteration of `senses-6` on one core (2 cores, no GPU, 2026-11-21).
    """
    _set(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    _set(_M_TRIM_THRESHOLD, _LARGEST_INT)


def give_back_freed_memory() -> None:
    """Let the allocator hand back every larger piece that is freed, until `keep_freed_memory`; glibc only.

    While a workload is built, parameters come and go that are larger than what stays of them, and what stays
    would lie scattered over all that they have taken. So do gradients while devices share out parameters.
    """
    _set(_M_MMAP_THRESHOLD, MIB)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(parameter, value)
