"""Published peaks of arithmetic: what estimates start from, and a run's share of the peak is taken of; and
board power, for what an iteration draws.

Sources: NVIDIA data sheets of A100 80GB SXM, H100 SXM and H200 SXM (dense; float32 without TF32; float16 as
bfloat16), V100 SXM2 and P100 SXM2, which have no bfloat16; the P100 has no tensor cores, its float16 is twice
its float32. A800 and H800 are the same chips with fewer NVLinks; of the H20, which has no data sheet, as
reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Arithmetic = Literal["float32", "bfloat16", "float16"]

_AMPERE: dict[Arithmetic, float] = {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}
_HOPPER: dict[Arithmetic, float] = {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12}
# Dense matrix products, in operations per second, by the beginning of a device's name in cluster files.
PEAK_FLOPS_PER_S: dict[str, dict[Arithmetic, float]] = {
    "a100": _AMPERE,
    "a800": _AMPERE,
    "h100": _HOPPER,
    "h800": _HOPPER,
    "h200": _HOPPER,
    "h20": {"bfloat16": 148e12, "float16": 148e12, "float32": 44e12},
    "v100": {"float16": 125e12, "float32": 15.7e12},
    "p100": {"float16": 21.2e12, "float32": 10.6e12},
}
# By a profile's or a workload's name of its precision; all others are bfloat16.
_OF_PRECISION: dict[str, Arithmetic] = {
    "full": "float32",
    "float32": "float32",
    "float16": "float16",
    "fp16-autocast": "float16",
}

# Board power (TDP) of the SXM modules, in watts, by the same names (NVIDIA data sheets; H20 as reported). Of
# cards for PCIe only the P100's is listed.
BOARD_WATTS: dict[str, float] = {
    "a100": 400.0,
    "a800": 400.0,
    "h100": 700.0,
    "h800": 700.0,
    "h200": 700.0,
    "h20": 400.0,
    "v100": 300.0,
    "p100": 300.0,
}
PCIE_BOARD_WATTS: dict[str, float] = {"p100": 250.0}


def peak_flops_per_s(device: str, arithmetic: Arithmetic) -> float | None:
    """The published peak of a cluster file's device type; None where none is published, as for a CPU.

    'a100-80gb' is an 'a100'.
    """
    chip = device.lower().partition("-")[0]
    return PEAK_FLOPS_PER_S.get(chip, {}).get(arithmetic)


def board_watts(device: str) -> float | None:
    """The published power of a cluster file's device type; None where none is listed, as for a CPU.

    'a100-80gb' is an 'a100' on an SXM module; 'p100-pcie-16gb' is a card.
    """
    chip, *rest = device.lower().split("-")
    return (PCIE_BOARD_WATTS if "pcie" in rest else BOARD_WATTS).get(chip)


def arithmetic_of(environment: Mapping[str, Any]) -> Arithmetic | None:
    """What the matrix products of a profile with this `environment` are computed in; None where it does not
    say.
    """
    precision = environment.get("precision")
    return _OF_PRECISION.get(precision, "bfloat16") if isinstance(precision, str) else None


def arithmetic_in(precision: str) -> Arithmetic:
    """What matrix products are computed in under a `train.precision`."""
    return _OF_PRECISION.get(precision, "bfloat16")
