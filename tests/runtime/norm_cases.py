"""Cases in which batch norms sum their statistics over the shares of their ops."""

from __future__ import annotations

from case_runs import ADAMW, SGD, Case
from hand_plans import Placement

# Slices of one MetaOp on other devices and on fewer, on one, and on the same in another order.
SPREAD: tuple[Placement, ...] = (
    ("few/blocks", (0, 2), (0, 1, 2)),
    ("many/blocks", (0, 1), (3,)),
    ("few/blocks", (2, 3), (1, 0)),
    ("many/blocks", (1, 2), (2, 3, 0, 1)),
    ("few/reduce", (0, 1), (2, 0, 1)),
    ("many/blocks", (2, 3), (3, 2)),
    ("many/reduce", (0, 1), (0, 1, 2, 3)),
)
RECOMPUTED = ("few/blocks", "many/blocks", "many/reduce")
NORMED = (
    Case("norms", SPREAD, toys="norm_toys", train=SGD),
    Case("norms-recomputed", SPREAD, toys="norm_toys", train=ADAMW, recompute=RECOMPUTED, long=True),
    Case(
        "norms-uneven",
        SPREAD,
        toys="norm_toys",
        offload=True,
        recompute=RECOMPUTED[:1],
        uneven=True,
        apart=1,
        steps=2,
    ),
    Case(
        "norms-accumulated",
        SPREAD,
        toys="norm_toys",
        args={"ignores": False},
        train={**ADAMW, "accumulate": 2},
        recompute=RECOMPUTED[:1],
        steps=2,
    ),
)
