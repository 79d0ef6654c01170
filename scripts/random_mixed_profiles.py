"""Random profiles on several types of device: those of `random_profiles.py` with a curve for each type.

Deterministic: a seed, a shape and the types give the same profile everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log
from random import Random
from typing import TypeVar

from random_profiles import Shape, random_profile

from spindle_cli.costs.flops import Arithmetic
from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.machine.devices import device_peak
from spindle_cli.profile.types import CurvePoint, Device, MetaOpProfile, Profile, ShareTime

# What random times are of, and what all types train in.
BASE = "a800-80gb"
ARITHMETIC: Arithmetic = "bfloat16"
Timed = TypeVar("Timed", CurvePoint, ShareTime)


def random_mixed_profile(seed: int, shape: Shape, cluster: Cluster, *, scale: float = 1.0) -> Profile:
    """A random profile with curves and shares for each of a cluster's types.

    Each MetaOp has a factor of its own for each type, between what the type's published peaks say of an op
    that computes alone and of one that moves memory alone: so MetaOps differ in what they lose least on.
    """
    profile = random_profile(seed, shape, scale=scale)
    factors = {device: _factors(seed, shape, device, len(profile.metaops)) for device in cluster.types}
    metaops = tuple(
        _on_types(metaop, {device: own[index] for device, own in factors.items()})
        for index, metaop in enumerate(profile.metaops)
    )
    devices = tuple(
        Device(type=device, name="imagined", memory_bytes=device_peak(device).memory_bytes)
        for device in cluster.types
    )
    update = {
        "metaops": metaops,
        "device": devices[0],
        "devices": devices,
        "environment": {"precision": ARITHMETIC},
        "optimizer_state_sharded": True,  # as GPUs of several types have to
    }
    return profile.model_copy(update=update)


def _factors(seed: int, shape: Shape, device: str, count: int) -> list[float]:
    """Of so many MetaOps, times as long as on `BASE`; the same whatever other types there are."""
    own, base = device_peak(device), device_peak(BASE)
    computing = log(base.flops_per_s[ARITHMETIC] / own.flops_per_s[ARITHMETIC])
    moving = log(base.memory_bytes_per_s / own.memory_bytes_per_s)
    random = Random(f"{device}-{shape}-{seed}")  # noqa: S311 - reproducible, not secret
    return [exp(computing + random.random() * (moving - computing)) for _ in range(count)]


def _on_types(metaop: MetaOpProfile, factors: Mapping[str, float]) -> MetaOpProfile:
    """With its curve on each type, and with the shares of its points, as profiles have them."""
    shares = [
        ShareTime(
            samples=metaop.batch_size // point.dp,
            forward_s=point.forward_s,
            backward_s=point.backward_s,
            source="estimated",
        )
        for point in reversed(metaop.curve)
    ]
    curve = tuple(_slower(point, device, own) for device, own in factors.items() for point in metaop.curve)
    on_types = tuple(_slower(share, device, own) for device, own in factors.items() for share in shares)
    return metaop.model_copy(update={"curve": curve, "shares": on_types})


def _slower(entry: Timed, device: str, factor: float) -> Timed:
    times = {"forward_s": entry.forward_s * factor, "backward_s": entry.backward_s * factor}
    return entry.model_copy(update={"device": device, **times})
