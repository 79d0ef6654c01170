"""Cases in which the shares of contrastive losses gather what they compare."""

from __future__ import annotations

from case_runs import ADAMW, SGD, Case
from hand_plans import Placement

# Losses on all devices in another order, and on some; one of shares that are not equal.
COMPARED: tuple[Placement, ...] = (
    ("clip/image", (0, 2), (0, 1)),
    ("clip/text", (0, 2), (2,)),
    ("siglip/image", (0, 2), (3,)),
    ("siglip/text", (0, 2), (2, 0)),
    ("clip/loss", (0, 1), (2, 0, 1)),
    ("siglip/loss", (0, 1), (3, 1, 0, 2)),
)
CONTRASTED = (
    Case("contrasts", COMPARED, toys="contrast_toys", train=SGD, steps=2),
    Case(
        "contrasts-uneven",
        COMPARED,
        toys="contrast_toys",
        recompute=("clip/loss",),
        uneven=True,
        apart=2,
        steps=2,
    ),
    Case(
        "contrasts-recomputed-accumulated",
        COMPARED,
        toys="contrast_toys",
        args={"labelled": False},
        train={**ADAMW, "accumulate": 2},
        offload=True,
        recompute=("clip/loss", "siglip/loss"),
        steps=2,
    ),
)
