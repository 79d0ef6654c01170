"""Cases of batches of several lengths beside all else: layers and words split, shares that gather what they
compare, transfers, streams, steps that run sets of tasks.
"""

from __future__ import annotations

from case_runs import ADAMW, SGD, Case
from hand_plans import Placement

TOYS = {"toys": "length_mix_toys", "has_lengths": True}
WRITE: tuple[Placement, ...] = (
    ("write/blocks", (0, 1), (0, 1), 2),
    ("write/blocks", (1, 2), (3, 1, 0, 2), 2),
)
MATCH: tuple[Placement, ...] = (
    ("match/blocks", (0, 1), (3,)),
    ("match/blocks", (1, 2), (2, 0), 2),
    ("match/loss", (0, 1), (2, 0, 1)),
)
PLACED: tuple[Placement, ...] = (
    *WRITE,
    *MATCH,
    ("chain/words", (0, 1), (2,)),
    ("chain/layer", (0, 1), (1, 3), 2),
    ("chain/layer", (1, 2), (0, 2)),
    ("chain/tail", (0, 1), (3, 1)),
)
SAMPLED = {
    **ADAMW,
    "accumulate": 2,
    "sampling": {"every": {"match": 2}, "draw": {"weights": {"write": 1.0, "chain": 1.0}, "seed": 1}},
}
# One by a plan of its own, where the same ops are split otherwise.
SETS = {
    "write": None,
    "chain": None,
    "write+match": [
        ("match/blocks", (0, 1), (1, 0), 2),
        ("write/blocks", (0, 2), (2, 3), 2),
        ("match/blocks", (1, 2), (0,)),
        ("match/loss", (0, 1), (1, 0, 3)),
    ],
    "match+chain": None,
}
# Planned for the shortest; losses in chunks and by words.
MIXED = Case(
    "mixed",
    PLACED,
    train={**SGD, "clip_norm": 0.5, "accumulate": 2, "loss_chunks": 3},
    recompute=("write/blocks", "match/blocks", "match/loss", "chain/layer"),
    percentile=1.0,
    **TOYS,
)
SAVED = Case(
    "mixed-saved",
    PLACED,
    args={"streams": True},
    train=SAMPLED,
    sets=SETS,
    steps=2,
    checkpoint_every=1,
    **TOYS,
)
# Its checkpoint lies between steps that run a task, and is gone on from by another plan.
GONE_ON = Case(
    "mixed-gone-on",
    (2, 1),
    args={"streams": True},
    train=SAMPLED,
    sets=dict.fromkeys(SETS),
    goes_on_with=SAVED.name,
    **TOYS,
)
