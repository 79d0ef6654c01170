"""Cases in which some ops run as they are written, on the whole batch, between others that are split."""

from __future__ import annotations

from case_runs import ADAMW, SGD, Case
from hand_plans import Placement

SPREAD: tuple[Placement, ...] = (
    ("focal/blocks", (0, 2), (0, 1, 2)),
    ("hardest/blocks", (0, 1), (3, 2)),
    ("preferred/blocks", (0, 1), (3,)),
    ("sequences/blocks", (0, 4), (1, 0)),
    ("focal/blocks", (2, 4), (2, 3)),
    ("preferred/blocks", (1, 2), (0,)),
    ("hardest/blocks-2", (0, 1), (1,)),
    ("focal/loss", (0, 1), (0,)),
    ("sequences/recurrent", (0, 1), (2, 3)),
    ("preferred/blocks-2", (0, 2), (3, 1, 0)),
    ("hardest/blocks-3", (0, 2), (2, 1)),
    ("sequences/blocks-2", (0, 1), (3,)),
    ("preferred/blocks-3", (0, 1), (1,)),
    ("hardest/loss", (0, 1), (3,)),
)
RECOMPUTED = ("hardest/blocks-2", "sequences/recurrent", "preferred/blocks-3", "focal/blocks")
WHOLE = (
    Case("whole", SPREAD, toys="whole_toys", train=ADAMW, steps=6),
    Case("whole-recomputed", SPREAD, toys="whole_toys", train=SGD, recompute=RECOMPUTED, steps=2),
    Case(
        "whole-accumulated",
        SPREAD,
        toys="whole_toys",
        train={**ADAMW, "accumulate": 2},
        steps=2,
        offload=True,
    ),
)
