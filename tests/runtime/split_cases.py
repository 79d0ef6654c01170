"""The cases with tensor parallelism that run in worker processes."""

from __future__ import annotations

import random
from functools import partial

import mixed_cases
from case_runs import ADAMW, Case
from hand_plans import Placement
from runtime_cases import CLIPPED, CLIPPED_BY_VALUE
from shard_cases import SPLIT as SHARED_OUT

from spindle_cli.files.sharding import Sharding
from spindle_cli.workload.graph import WorkloadGraph

# Degrees of 1, 2 and 4 for the same parameters, on ranks that hold all of them, a half, or other halves;
# groups in another order than their ranks; losses in split slices.
SPLIT: tuple[Placement, ...] = (
    ("left/tower", (0, 1), (0, 1), 2),
    ("right/tower", (0, 2), (2,)),
    ("left/tower", (1, 3), (3, 1, 0, 2), 2),
    ("right/tower", (2, 3), (0, 1, 2, 3), 4),
    ("right/layers", (0, 1), (1, 0)),
    ("right/layers", (1, 2), (2, 3), 2),
)


def split_at_random(seed: int, num_devices: int, graph: WorkloadGraph) -> tuple[Placement, ...]:
    """A random plan of `split_toys` that mixes data and tensor parallelism."""
    draw = random.Random(seed)
    placements: list[Placement] = []
    for metaop in graph.metaops:
        first = 0
        while first < len(metaop.ops):
            last = draw.randint(first + 1, len(metaop.ops))
            dp, tp = draw.choice([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
            devices = draw.sample(range(num_devices), dp * tp)
            placements.append((metaop.name, (first, last), tuple(devices), tp))
            first = last
    return tuple(placements)


# Samples and experts shared out over 2 and 4 devices, in groups in another order than their ranks, and not.
ROUTED: tuple[Placement, ...] = (
    ("left/tower", (0, 1), (0, 1), 2),
    ("right/tower", (0, 2), (0, 1, 2, 3), 4),
    ("left/tower", (1, 3), (3, 1, 0, 2), 2),
    ("right/tower", (2, 3), (2,)),
)


# Groups on another node than what they take from, and give to: whole shares, and shares in two chunks.
BETWEEN_NODES: tuple[Placement, ...] = (
    ("left/tower", (0, 1), (0, 1)),
    ("right/tower", (0, 2), (1, 0), 2),
    ("left/tower", (1, 3), (3, 2), 2),
    ("right/tower", (2, 3), (2, 3), 2),
    ("right/layers", (0, 1), (1,)),
    ("right/layers", (1, 2), (2, 3), 2),
)


FROZEN = {"frozen": True}
RECOMPUTED = ("left/tower", "right/tower", "right/layers")
UNDISTURBED = Case("undisturbed", SPLIT, "split_toys", args=FROZEN, train=ADAMW)
EXACT = (
    UNDISTURBED,
    Case("split", SPLIT, "split_toys", train=ADAMW, steps=2),
    Case("clipped", SPLIT, "split_toys", args=FROZEN, train=CLIPPED, long=True),
    Case("recomputed", SPLIT, "split_toys", recompute=RECOMPUTED, steps=2),
    Case("whole-state", SPLIT, "split_toys", train={**ADAMW, "shard_optimizer": False}, steps=2),
    Case(
        "accumulated", SPLIT, "split_toys", args=FROZEN, train={**CLIPPED_BY_VALUE, "accumulate": 2}, steps=2
    ),
    Case("cut", SPLIT, "split_toys", train=ADAMW, micro_batches={"left": 4, "right": 2}, apart=6, long=True),
    Case(
        "uneven",
        SPLIT,
        "split_toys",
        train={**CLIPPED, "accumulate": 2},
        micro_batches={"left": 2},
        uneven=True,
        apart=3,
        steps=2,
    ),
    Case("chunks", SPLIT, "split_toys", train={**ADAMW, "loss_chunks": 2}, long=True),
    Case(
        "chunks-recomputed",
        SPLIT,
        "split_toys",
        args=FROZEN,
        train={**CLIPPED, "accumulate": 2, "loss_chunks": 5},
        offload=True,
        recompute=RECOMPUTED,
        steps=2,
    ),
    Case("random-0", partial(split_at_random, 0, 4), "split_toys", steps=2),
    Case("random-3", partial(split_at_random, 3, 4), "split_toys", long=True),
    SHARED_OUT,
    Case("routed", ROUTED, "routed_toys", train={**CLIPPED, "accumulate": 2}, long=True),
    # Micro-batches of fewer samples than devices.
    Case(
        "routed-cut",
        ROUTED,
        "routed_toys",
        args=FROZEN,
        train=ADAMW,
        micro_batches={"left": 4, "right": 2},
        recompute=("left/tower",),
        apart=6,
        steps=2,
    ),
    Case(
        "routed-shared-out",
        ROUTED,
        "routed_toys",
        train={**CLIPPED, "accumulate": 2},
        offload=True,
        apart=7,
        sharding=Sharding.PARAMETERS,
        steps=2,
    ),
)
IN_PARTS = (
    Case("in-parts", BETWEEN_NODES, "split_toys", train=ADAMW, slow_between_nodes=True, steps=2),
    Case(
        "in-parts-cut",
        BETWEEN_NODES,
        "split_toys",
        args=FROZEN,
        train={**CLIPPED, "accumulate": 2},
        micro_batches={"left": 4, "right": 2},
        apart=6,
        slow_between_nodes=True,
        steps=2,
    ),
)
# A run that is cut short after its second step, and goes on by the same plan and by others.
SAVED = Case("saved", SPLIT, "split_toys", args=FROZEN, train=ADAMW, steps=2, checkpoint_every=1)
GONE_ON = Case("gone-on", SPLIT, "split_toys", args=FROZEN, train=ADAMW, goes_on_with=SAVED.name)
UNSPLIT_SAVED = Case("unsplit-saved", (3, 1), "split_toys", train=ADAMW, steps=2, checkpoint_every=1)
GONE_ON_ELSEWHERE = (
    Case(
        "elsewhere",
        partial(split_at_random, 7, 4),
        "split_toys",
        args=FROZEN,
        train=ADAMW,
        goes_on_with=SAVED.name,
    ),
    Case("unsplit", (3, 1), "split_toys", args=FROZEN, train=ADAMW, goes_on_with=SAVED.name),
    Case("split-now", SPLIT, "split_toys", train=ADAMW, goes_on_with=UNSPLIT_SAVED.name),
)
# With dropout nothing is comparable with plain PyTorch, but copies with each other and runs with runs.
CHANCE = {"dropout": 0.3}
BY_CHANCE = Case("chance", SPLIT, "split_toys", args=CHANCE, train=ADAMW, steps=2)
BY_CHANCE_RECOMPUTED = Case(
    "chance-recomputed",
    SPLIT,
    "split_toys",
    args=CHANCE,
    train=ADAMW,
    recompute=RECOMPUTED,
    steps=2,
)
ON_FOUR = (
    *EXACT,
    *IN_PARTS,
    SAVED,
    GONE_ON,
    UNSPLIT_SAVED,
    *GONE_ON_ELSEWHERE,
    BY_CHANCE,
    BY_CHANCE_RECOMPUTED,
    mixed_cases.MIXED,
    mixed_cases.SAVED,
    mixed_cases.GONE_ON,
)
