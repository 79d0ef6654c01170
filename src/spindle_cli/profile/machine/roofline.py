"""Seconds of work on a device from its published peaks.

A roofline per kernel, with three effects that keep small work from scaling: a matrix product with few output
tiles does not fill the device, a shallow one spends its time on starting tiles, and no operation runs faster
than the host can dispatch its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spindle_cli.costs.flops import Arithmetic
from spindle_cli.costs.parameters import update_traffic
from spindle_cli.profile.machine.devices import DevicePeak


@dataclass(frozen=True)
class Kernel:
    """One kernel's work: operations of matrix products, bytes read and written, elements of its output."""

    flops: float
    num_bytes: float
    output_elements: float


# A product deeper than this is split along its depth as well (split-K), so that few output tiles still fill a
# device.
_SPLIT_DEPTH = 1024


def filled_share(kernel: Kernel, device: DevicePeak) -> float:
    """Share of a device that a matrix product keeps busy, in (0, 1).

    Tiles run in rounds of `tiles_to_fill`, and the last round is on average half empty, so `tiles` tiles take
    `tiles / tiles_to_fill + 1/2` rounds (wave quantisation: NVIDIA, Matrix Multiplication Background User's
    Guide, section 3.2).
    """
    if device.tiles_to_fill == 1 or not kernel.output_elements:
        return 1.0
    depth = kernel.flops / (2 * kernel.output_elements)
    tiles = max(kernel.output_elements / device.tile_elements, 1.0) * max(depth / _SPLIT_DEPTH, 1.0)
    rounds = tiles / device.tiles_to_fill
    return rounds / (rounds + 0.5)


def deep_share(kernel: Kernel, device: DevicePeak) -> float:
    """Share of a tile's time that goes into products and not into starting and ending it, in (0, 1]."""
    if not kernel.output_elements:
        return 1.0
    depth = kernel.flops / (2 * kernel.output_elements)
    return depth / (depth + device.ramp_depth)


def kernel_s(kernel: Kernel, device: DevicePeak, precision: Arithmetic) -> float:
    """Seconds of the device for one kernel: a fixed gap, then the longer of arithmetic and memory traffic."""
    arithmetic_s = 0.0
    if kernel.flops:
        peak = device.flops_per_s[precision] * device.best_matrix_share
        arithmetic_s = kernel.flops / (peak * filled_share(kernel, device) * deep_share(kernel, device))
    memory_s = kernel.num_bytes / (device.memory_bytes_per_s * device.best_memory_share)
    return device.device_s_per_kernel + max(arithmetic_s, memory_s)


def kernels_s(kernels: Iterable[Kernel], device: DevicePeak, precision: Arithmetic) -> float:
    """Seconds for kernels in a row: the host dispatches ahead, so the slower of the two sets the pace."""
    device_s = host_s = 0.0
    for kernel in kernels:
        device_s += kernel_s(kernel, device, precision)
        host_s += device.host_s_per_kernel
    return max(device_s, host_s)


def update_s_per_byte(state_per_param: float, device: DevicePeak) -> float:
    """Seconds of an elementwise optimizer's step for each byte of parameters: all of it is memory traffic."""
    return update_traffic(state_per_param) / (device.memory_bytes_per_s * device.best_memory_share)
