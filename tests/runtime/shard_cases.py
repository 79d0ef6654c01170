"""Cases whose parameters, or gradients, are shared out over the devices that run them."""

from __future__ import annotations

from case_runs import ADAMW, SGD, Case
from hand_plans import Placement

from spindle_cli.files.sharding import Sharding

# What comes behind the towers: on one device, on two and on all.
_BEHIND: tuple[Placement, ...] = (
    ("pairs/contrast", (0, 1), (3,)),
    ("classify/mix", (0, 1), (1, 2)),
    ("classify/mix-2", (0, 1), (2, 3, 1)),
    ("caption/center", (0, 1), (1,)),
    ("caption/layers", (0, 3), (0, 2, 1, 3)),
    ("caption/project", (0, 1), (1, 2)),
    ("classify/fuse", (0, 1), (3, 0, 1, 2)),
)
# Some of it on all devices, some on two, some scattered; tasks share towers.
ON_SOME: tuple[Placement, ...] = (
    ("pairs/vision", (0, 2), (0, 1)),
    ("pairs/vision", (2, 4), (1, 0)),
    ("classify/vision", (0, 4), (0, 1)),
    ("caption/vision", (0, 4), (1, 0)),
    ("pairs/text", (0, 3), (3, 2)),
    ("classify/text", (0, 3), (2, 3)),
    *_BEHIND,
)
FROZEN_TOWER = {"frozen_tower": True}
CLIPPED = {**SGD, "optimizer_args": {"momentum": 0.9}, "clip_norm": 0.5}
CLIPPED_BY_VALUE = {**SGD, "optimizer_args": {"momentum": 0.9}, "clip_value": 0.02}
SHARED_OUT = (
    Case(
        "shared-out",
        ON_SOME,
        args={"reduction": "sum"},
        train={**CLIPPED_BY_VALUE, "accumulate": 2},
        offload=True,
        recompute=("pairs/vision", "caption/layers", "classify/mix"),
        micro_batches={"classify": 2},
        apart=3,
        sharding=Sharding.PARAMETERS,
        steps=2,
    ),
    Case(
        "kept-shared-out",
        ON_SOME,
        args={"reduction": "sum", **FROZEN_TOWER},
        train={**CLIPPED, "accumulate": 2},
        recompute=("pairs/vision", "classify/mix"),
        micro_batches={"classify": 2},
        apart=5,
        sharding=Sharding.KEPT,
        weights=(1, 3, 2, 5),
        steps=2,
    ),
    Case(
        "gradients-shared-out",
        ON_SOME,
        train={**ADAMW, "accumulate": 2},
        apart=2,
        sharding=Sharding.GRADIENTS,
        weights=(2, 1, 7, 1),
        steps=2,
    ),
)
# Towers by replica groups of two: all of a task's, or some ops, one task's ops on both in turn.
ON_TEAMS: tuple[Placement, ...] = (
    ("pairs/vision", (0, 2), (0, 1)),
    ("classify/vision", (0, 4), (2, 3)),
    ("pairs/vision", (2, 4), (3, 2)),
    ("caption/vision", (0, 4), (1, 0)),
    ("pairs/text", (0, 3), (3, 1)),
    ("classify/text", (0, 3), (0, 2)),
    *_BEHIND,
)
BY_TEAMS = (
    Case(
        "replica_groups",
        ON_TEAMS,
        args={"reduction": "sum", **FROZEN_TOWER},
        train={**CLIPPED, "accumulate": 2},
        offload=True,
        recompute=("pairs/vision", "caption/layers"),
        apart=11,
        sharding=Sharding.PARAMETERS,
        steps=2,
    ),
    # Other ranges in one replica group than in the other.
    Case(
        "uneven-replica_groups",
        ON_TEAMS,
        train={**ADAMW, "accumulate": 2},
        micro_batches={"classify": 2},
        apart=12,
        sharding=Sharding.KEPT,
        weights=(1, 3, 2, 5),
        steps=2,
    ),
    Case(
        "replica_groups-float32",
        ON_TEAMS,
        train=ADAMW,
        dtype="float32",
        sharding=Sharding.PARAMETERS,
        apart=13,
        steps=2,
    ),
)
SAVED_BY_TEAMS = Case(
    "saved-by-replica_groups",
    ON_TEAMS,
    args=FROZEN_TOWER,
    train=ADAMW,
    steps=2,
    checkpoint_every=1,
    apart=14,
    sharding=Sharding.PARAMETERS,
    weights=(3, 1, 1, 2),
)
STATE_WHOLE = Case(
    "state-whole",
    ON_SOME,
    train={**ADAMW, "accumulate": 2, "clip_norm": 0.5},
    apart=3,
    sharding=Sharding.NONE,
    steps=2,
)
SAVED = Case(
    "saved-shared-out",
    ON_SOME,
    args=FROZEN_TOWER,
    train=ADAMW,
    steps=2,
    checkpoint_every=1,
    apart=4,
    sharding=Sharding.PARAMETERS,
)
# By tensor parallelism of several degrees, over all devices and over two.
SPLIT = Case(
    "shared-out",
    (
        ("left/tower", (0, 1), (0, 1, 2, 3), 2),
        ("right/tower", (0, 2), (0, 1, 2, 3), 2),
        ("left/tower", (1, 3), (3, 1, 0, 2), 2),
        ("right/tower", (2, 3), (0, 1, 2, 3), 4),
        ("right/layers", (0, 1), (1, 0)),
        ("right/layers", (1, 2), (0, 1), 2),
    ),
    "split_toys",
    args={"frozen": True},
    train={**CLIPPED, "accumulate": 2},
    recompute=("right/tower",),
    offload=True,
    apart=7,
    sharding=Sharding.PARAMETERS,
    weights=(1, 2, 3, 1),
    steps=2,
)
