"""Cases of batches padded to the longest of their samples: no length is that of the step before."""

from __future__ import annotations

from case_runs import ADAMW, SGD, Case
from hand_plans import Placement

# Shares, slices of one task on different devices, a device that reads no field of its task.
APART: tuple[Placement, ...] = (
    ("text/blocks", (0, 1), (0, 1)),
    ("score/blocks", (0, 1), (3,)),
    ("plain/blocks", (0, 1), (2, 3)),
    ("text/blocks", (1, 2), (2, 3, 1, 0)),
    ("score/blocks", (1, 2), (1, 2)),
    ("plain/blocks", (1, 2), (0,)),
)
TOYS = {"toys": "../helpers/length_toys", "has_lengths": True}
LENGTHS = (
    Case("lengths", APART, **TOYS),
    # Planned for the shortest: most batches are longer.
    Case("lengths-longer", APART, train={**ADAMW, "clip_norm": 0.5}, percentile=1.0, **TOYS, long=True),
    Case(
        "lengths-recomputed",
        (1, 3),
        offload=True,
        recompute=("text/blocks", "score/blocks"),
        train=SGD,
        **TOYS,
        steps=2,
    ),
    Case("lengths-in-chunks", (0, 2), train={**SGD, "loss_chunks": 3}, steps=2, **TOYS),
    Case("lengths-loaded", APART, train={**SGD, "loader": {"workers": 1}}, **TOYS),
    Case(
        "lengths-accumulated",
        (1, 2),
        train={**SGD, "accumulate": 2},
        uneven=True,
        apart=1,
        steps=2,
        **TOYS,
    ),
)
