"""Random profiles to try planners on: wide, deep, merging, many levels, odd batches, curves with plateaus.

Deterministic: a seed and a shape give the same profile everywhere. Used by the property tests and by the
    planner's benchmark.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Literal, get_args

from spindle_cli.profile.types import CurvePoint, Device, MetaOpProfile, Profile, WorkloadRef
from spindle_cli.units import GIB, MIB

Shape = Literal["wide", "deep", "merging", "levels", "towers"]
SHAPES: tuple[Shape, ...] = get_args(Shape)

EVEN_BATCHES = (16, 32, 64, 128, 256)
ODD_BATCHES = (6, 12, 15, 20, 24, 36, 48, 60, 90, 96, 100, 120, 144)


def random_profile(seed: int, shape: Shape, *, scale: float = 1.0, most_tp: int = 1) -> Profile:
    """A random profile.

    Args:
        shape: `wide`, many independent MetaOps; `deep`, a few long chains; `merging`, encoders that meet in
            one model;
            `levels`, a layered graph with random edges; `towers`, tasks of two encoders and a loss.
        scale: multiplies work and batches, for larger clusters.
        most_tp: MetaOps with parameters to split have points with tensor parallelism of 2, 4, ... up to this.
    """
    random = Random(f"{shape}-{seed}")  # noqa: S311 - reproducible, not secret
    edges = _EDGES[shape](random)
    batches = EVEN_BATCHES if random.random() < 0.5 else EVEN_BATCHES + ODD_BATCHES
    metaops = []
    for index, inputs in enumerate(edges):
        small = shape == "towers" and index % 3 == 2
        metaop = _metaop(random, index, inputs, batches, scale, small=small)
        metaops.append(metaop if small else _with_tp(seed, metaop, most_tp))
    return Profile(
        workload=WorkloadRef(
            name=f"random-{shape}-{seed}", fingerprint=f"sha256:{seed:064d}", source="random"
        ),
        device=Device(type="a800-80gb", name="imagined", memory_bytes=80 * GIB),
        metaops=tuple(metaops),
    )


def _metaop(
    random: Random,
    index: int,
    inputs: tuple[int, ...],
    batches: tuple[int, ...],
    scale: float,
    *,
    small: bool,
) -> MetaOpProfile:
    batch_size = random.choice(batches) * max(1, round(scale))
    num_ops = 1 if small else random.choice((4, 6, 8, 12, 16, 24, 32, 48))
    work_s = scale * (0.0005 if small else 10 ** random.uniform(-2.3, -0.7))
    return MetaOpProfile(
        name=f"m{index}",
        task=f"task{index // 3}",
        num_ops=num_ops,
        batch_size=batch_size,
        inputs=tuple(f"m{i}" for i in inputs),
        parameters=f"component{random.randrange(6)}-{num_ops}",
        param_bytes_per_op=random.randrange(1, 64) * MIB,
        activation_bytes_per_op=batch_size * random.randrange(64, 1024) * 1024,
        output_bytes=batch_size * random.randrange(16, 256) * 1024,
        curve=_curve(random, work_s, batch_size),
    )


def _curve(random: Random, work_s: float, batch_size: int) -> tuple[CurvePoint, ...]:
    """Data-parallel points T = overhead + work / n, some no faster than the one before (a plateau)."""
    overhead_s = work_s * 10 ** random.uniform(-3, -1.3)
    plateaus = random.random() < 0.3
    points: list[CurvePoint] = []
    for dp in (n for n in range(1, batch_size + 1) if batch_size % n == 0):
        op_s = overhead_s + work_s / dp
        if points and plateaus and random.random() < 0.3:
            op_s = points[-1].op_s
        points.append(
            CurvePoint(num_devices=dp, dp=dp, forward_s=op_s / 3, backward_s=op_s * 2 / 3, source="estimated")
        )
    return tuple(points)


def _with_tp(seed: int, metaop: MetaOpProfile, most_tp: int) -> MetaOpProfile:
    """The MetaOp with points of 2, 4, ... `most_tp`, some faster than data parallelism on as many devices;
    some of its parameters stay whole.
    """
    random = Random(f"tp-{seed}-{metaop.name}")  # noqa: S311 - reproducible, not secret
    if most_tp == 1 or random.random() < 0.2:
        return metaop
    points = list(metaop.curve)
    tp = 2
    while tp <= most_tp:
        factor = random.uniform(0.8, 1.2) / tp
        points += [
            CurvePoint(
                num_devices=point.dp * tp,
                dp=point.dp,
                tp=tp,
                forward_s=point.forward_s * factor,
                backward_s=point.backward_s * factor,
                source="estimated",
            )
            for point in metaop.curve
        ]
        tp *= 2
    points.sort(key=lambda point: (point.num_devices, point.tp))
    whole = metaop.param_bytes_per_op // random.choice((4, 16, 64))
    return metaop.model_copy(update={"curve": tuple(points), "whole_param_bytes_per_op": whole})


Edges = list[tuple[int, ...]]  # the inputs of each MetaOp, all with a smaller index


def _wide(random: Random) -> Edges:
    return [()] * random.randrange(8, 31)


def _deep(random: Random) -> Edges:
    edges: Edges = []
    for _ in range(random.randrange(2, 6)):
        length = random.randrange(3, 9)
        edges += [() if k == 0 else (len(edges) + k - 1,) for k in range(length)]
    return edges


def _merging(random: Random) -> Edges:
    edges: Edges = []
    for _ in range(random.randrange(2, 6)):
        encoders = random.randrange(1, 4)
        first = len(edges)
        edges += [()] * encoders
        edges.append(tuple(range(first, first + encoders)))
        if random.random() < 0.5:
            edges.append((len(edges) - 1,))
    return edges


def _levels(random: Random) -> Edges:
    edges: Edges = []
    above: list[int] = []
    for _ in range(random.randrange(3, 7)):
        level = range(len(edges), len(edges) + random.randrange(2, 7))
        for _ in level:
            edges.append(tuple(sorted(random.sample(above, min(len(above), random.randrange(1, 3))))))
        above = list(level)
    return edges


def _towers(random: Random) -> Edges:
    edges: Edges = []
    for _ in range(random.randrange(3, 11)):
        first = len(edges)
        edges += [(), (), (first, first + 1)]
    return edges


_EDGES: dict[Shape, Callable[[Random], Edges]] = {
    "wide": _wide,
    "deep": _deep,
    "merging": _merging,
    "levels": _levels,
    "towers": _towers,
}
