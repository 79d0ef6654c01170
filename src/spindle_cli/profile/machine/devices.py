"""Published peaks of the devices that curves can be estimated for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spindle_cli.costs.flops import PEAK_FLOPS_PER_S, Arithmetic
from spindle_cli.errors import InputError
from spindle_cli.profile.types import Device
from spindle_cli.units import GIB

_MEMORY = re.compile(r"\d+gb")


@dataclass(frozen=True)
class DevicePeak:
    """What a device can do at best, and the constants of how far below that small work stays.

    Attributes:
        name: as cluster files call it.
        flops_per_s: dense matrix products, by precision.
        memory_bytes_per_s: reading and writing the device's memory.
        best_matrix_share, best_memory_share: of the two peaks, what the best real kernels reach.
        tiles_to_fill: output tiles of a matrix product that run at once (one per multiprocessor); fewer leave
            part idle.
        tile_elements: output elements of one tile.
        ramp_depth: depth of a matrix product that takes as long as starting and ending a tile does, so that a
            product of this depth reaches half of what a very deep one does.
        host_s_per_kernel: seconds of the host to dispatch one kernel; it runs ahead of the device.
        device_s_per_kernel: seconds of the device between one kernel's last work and the next one's first.
    """

    name: str
    flops_per_s: dict[Arithmetic, float]
    memory_bytes: int
    memory_bytes_per_s: float
    best_matrix_share: float
    best_memory_share: float
    tiles_to_fill: int
    tile_elements: int
    ramp_depth: int
    host_s_per_kernel: float
    device_s_per_kernel: float


# cuBLAS tiles of 128 x 128 to 256 x 128 (NVIDIA, Matrix Multiplication Background User's Guide, section 2.3).
_GPU_TILE_ELEMENTS = 128 * 128
# A tile fills its pipeline before its first product and writes its outputs after the last (NVIDIA, the same
# guide, section 2.1: shallow products stay well below the peak). Calibrated: docs/benchmarks/calibration.md.
_GPU_RAMP_DEPTH = 512
# Eager PyTorch spends 5-25 us of host time per operation; calibrated (docs/benchmarks/calibration.md).
_HOST_S_PER_KERNEL = 20e-6
# Between two dependent kernels of a stream.
_DEVICE_S_PER_KERNEL = 1.5e-6


# Peaks: NVIDIA data sheets (costs/flops.py). Best matrix share: an 8192-cube bf16 product on an H200 measured
# 769-798 of 989 TFLOP/s; best memory share: a copy on an H200 measured 4,300 of 4,800 GB/s. Multiprocessors:
# 108 (A100), 132 (H100, H200).
def _gpu(name: str, memory_bytes: int, bytes_per_s: float, multiprocessors: int) -> DevicePeak:
    """Return a GPU; one of which no kernels have been looked at is taken to reach what the others do."""
    return DevicePeak(
        name=name,
        flops_per_s=dict(PEAK_FLOPS_PER_S[name.partition("-")[0]]),
        memory_bytes=memory_bytes,
        memory_bytes_per_s=bytes_per_s,
        best_matrix_share=0.8,
        best_memory_share=0.9,
        tiles_to_fill=multiprocessors,
        tile_elements=_GPU_TILE_ELEMENTS,
        ramp_depth=_GPU_RAMP_DEPTH,
        host_s_per_kernel=_HOST_S_PER_KERNEL,
        device_s_per_kernel=_DEVICE_S_PER_KERNEL,
    )


_A100 = _gpu("a100-80gb", 80 * GIB, 2.039e12, 108)
_H100 = _gpu("h100-80gb", 80 * GIB, 3.35e12, 132)
_H200 = _gpu("h200-141gb", 141 * 10**9, 4.8e12, 132)
# Kernels of these have not been looked at.
_H20 = _gpu("h20-96gb", 96 * GIB, 4.0e12, 78)
_V100 = _gpu("v100-32gb", 32 * GIB, 0.9e12, 80)
_P100 = _gpu("p100-16gb", 16 * GIB, 0.732e12, 56)
# One core of a server, one thread: two 256-bit fused multiply-adds a cycle at 2.5 GHz make 80 GFLOP/s, of
# which half is reached; no tile ever leaves it idle. bfloat16 is emulated at float32's speed;
# float16, without instructions for it, was measured at 2.3 GFLOP/s (products of 256 cubed; 0.6 of 1024 cubed;
# torch 2.13, one thread of an AMD EPYC, 2026-11-23).
_CPU = DevicePeak(
    name="cpu",
    flops_per_s={"bfloat16": 80e9, "float16": 4e9, "float32": 80e9},
    memory_bytes=4 * GIB,
    memory_bytes_per_s=10e9,
    best_matrix_share=0.5,
    best_memory_share=0.8,
    tiles_to_fill=1,
    tile_elements=64,
    ramp_depth=0,
    host_s_per_kernel=0.0,
    device_s_per_kernel=5e-6,
)

_BY_NAME: dict[str, DevicePeak] = {
    "a100": _A100,
    "a100-80gb": _A100,
    "a800": _A100,
    "a800-80gb": _A100,
    "h100": _H100,
    "h100-80gb": _H100,
    "h800": _H100,
    "h800-80gb": _H100,
    "h200": _H200,
    "h200-141gb": _H200,
    "h20": _H20,
    "h20-96gb": _H20,
    "v100": _V100,
    "v100-32gb": _V100,
    "v100-16gb": replace(_V100, name="v100-16gb", memory_bytes=16 * GIB),
    "p100": _P100,
    "p100-16gb": _P100,
    "cpu": _CPU,
}


def listed_devices() -> tuple[str, ...]:
    """Return every name that `device_peak` knows."""
    return tuple(_BY_NAME)


def cluster_device_name(device: Device) -> str:
    """Return what a cluster file calls a profile's device: 'NVIDIA H200' -> 'h200-141gb'.

    An unlisted one, or one with another memory than the listed, goes by its own name.
    """
    if device.type != "cuda":
        return _full_name(device.type)
    words = _words(device.name)
    memory = {word for word in words if _MEMORY.fullmatch(word)}
    for name in _BY_NAME:
        chip, _, size = _full_name(name).partition("-")
        if chip in words and (not memory or size in memory):
            return _full_name(name)
    return "-".join(words)


def is_same_device(device: Device, cluster_device: str) -> bool:
    """Whether a profile's device is of the type that a cluster file names.

    Names count as equal in their short and long form ('h100', 'h100-80gb'). The name of an unlisted GPU may
    be shortened to some of its words: 'rtx-4090' is an 'NVIDIA GeForce RTX 4090'.
    """
    wanted = _full_name(cluster_device)
    profiled = cluster_device_name(device)
    if profiled == wanted:
        return True
    unlisted = device.type == "cuda" and profiled not in _BY_NAME and wanted not in _BY_NAME
    return unlisted and set(_words(wanted)) <= set(_words(device.name))


def _full_name(name: str) -> str:
    """'a100' -> 'a100-80gb'; others stay."""
    name = name.lower()
    return next((full for full in _BY_NAME if full.startswith(f"{name}-")), name)


def _words(name: str) -> list[str]:
    return name.lower().replace("-", " ").split()


def device_peak(name: str) -> DevicePeak:
    """Return the peaks of a listed device, by the name that cluster files give it.

    Raises:
        InputError: not listed.
    """
    if name not in _BY_NAME:
        raise InputError(
            f"no published peaks are listed for the device {name!r}; known: {', '.join(_BY_NAME)}",
            hint="Name one of these with --device, or profile without --estimate where the device is.",
        )
    return _BY_NAME[name]


def require_precision(names: Sequence[str], precision: Arithmetic) -> None:
    """Refuse arithmetic that a listed device does not have, or one with a listed chip ('p100-pcie-12gb').

    Raises:
        InputError: one lacks it.
    """
    for name in names:
        listed = _BY_NAME.get(name)
        of_chips = (PEAK_FLOPS_PER_S.get(word) for word in _words(name))
        peaks = next(filter(None, of_chips), None) if listed is None else listed.flops_per_s
        if peaks is not None and precision not in peaks:
            raise InputError(
                f"{name!r} has no {precision}, only {' and '.join(peaks)}",
                hint="Train in float16 autocast with a loss scale (train.precision: fp16-autocast), or in "
                "float32 (train.precision: full, profiled with --precision float32); profile so on all types "
                "of device alike. Or leave these devices out.",
            )
