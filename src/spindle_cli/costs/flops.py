"""Floating-point operations of one batch's forward and backward passes, as far as anything is trained; the
published peaks of arithmetic, which estimates start from and a run's share of the peak is taken of; and board
power, for what an iteration draws.

Sources: NVIDIA data sheets of A100 80GB SXM, H100 SXM and H200 SXM (dense; float32 without TF32; float16 as
bfloat16), V100 SXM2 and P100 SXM2, which have no bfloat16; the P100 has no tensor cores, its float16 is twice
its float32. A800 and H800 are the same chips with fewer NVLinks; of the H20, which has no data sheet, as
reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from spindle_cli.plan.types import PlanMetaOp
from spindle_cli.profile.metagraph import topological_order
from spindle_cli.profile.types import MetaOp


def flops_by_metaop(metaops: Sequence[PlanMetaOp]) -> dict[str, float] | None:
    """The floating-point operations of each MetaOp's ops on their whole batch; None where the profile has not
    counted them all.
    """
    flops = flops_by_pass(metaops)
    if flops is None:
        return None
    return {metaop.name: metaop.num_ops * sum(flops[metaop.name]) for metaop in metaops}


def flops_by_pass(metaops: Sequence[PlanMetaOp]) -> dict[str, tuple[float, float]] | None:
    """The floating-point operations of one op of each MetaOp on its whole batch, forward and backward; None
    where the profile has not counted them all. What is done again, where activations are recomputed, does not
    count.

    A product of matrices is one product forward, and backward one for each operand that takes a gradient.
    Of frozen parameters, and where neither an op nor what comes before it trains anything, there is none.
    """
    flops: dict[str, tuple[float, float]] = {}
    reached = reached_by_gradients(metaops)
    for metaop in metaops:
        forward = metaop.flops_per_op
        if forward is None:
            return None
        flops[metaop.name] = forward, forward * _backward_products(metaop, is_reached=reached[metaop.name])
    return flops


def _backward_products(metaop: MetaOp, *, is_reached: bool) -> float:
    """Counts the products of a backward pass for each product forward. `is_reached`: by gradients."""
    if not is_reached:
        return 0.0
    return 1.0 + (metaop.trainable_fraction if _has_parameters(metaop) else 1.0)


def reached_by_gradients(metaops: Collection[MetaOp]) -> dict[str, bool]:
    """Whether gradients come to each MetaOp: it, or one before it, trains something."""
    by_name = {metaop.name: metaop for metaop in metaops}
    reached: dict[str, bool] = {}
    for name in topological_order(metaops):
        metaop = by_name[name]
        trains_any = _has_parameters(metaop) and metaop.trainable_fraction > 0
        reached[name] = trains_any or any(reached[producer] for producer in metaop.inputs)
    return reached


def _has_parameters(metaop: MetaOp) -> bool:
    return metaop.param_bytes_per_op > 0 or any(metaop.extra_param_bytes.values())


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
