"""The cases that run in worker processes: what is trained, and on which devices each part of it runs."""

from __future__ import annotations

import random
from functools import partial

from case_runs import ADAMW, SGD, Case
from contrast_cases import CONTRASTED
from gradient_cases import GRADIENTS, OWN_NOISE
from hand_plans import Placement, whole
from length_cases import LENGTHS
from norm_cases import NORMED
from pair_cases import case_of
from shard_cases import BY_TEAMS, ON_SOME, ON_TEAMS, SAVED_BY_TEAMS, SHARED_OUT, STATE_WHOLE
from shard_cases import SAVED as SAVED_SHARED_OUT
from whole_cases import WHOLE

from spindle_cli.files.sharding import Sharding
from spindle_cli.workload.graph import WorkloadGraph

# Shares, slices of one MetaOp on different devices, two inputs from different devices, shared parameters of
# tasks on different devices, the same devices in another order.
SCATTERED: tuple[Placement, ...] = (
    ("pairs/vision", (0, 2), (0, 1)),
    ("pairs/text", (0, 2), (2,)),
    ("classify/vision", (0, 3), (3,)),
    ("classify/text", (0, 1), (2, 0)),
    ("pairs/vision", (2, 4), (1, 3, 2, 0)),
    ("pairs/text", (2, 3), (1, 0)),
    ("classify/text", (1, 3), (0, 1, 2)),
    ("classify/vision", (3, 4), (1, 0)),
    ("caption/vision", (0, 1), (3, 2)),
    ("caption/vision", (1, 4), (2,)),
    ("pairs/contrast", (0, 1), (3,)),
    ("classify/mix", (0, 1), (1, 2)),
    ("classify/mix-2", (0, 1), (2, 3, 1)),
    ("caption/center", (0, 1), (1,)),
    ("caption/layers", (0, 1), (2, 0)),
    ("caption/layers", (1, 3), (0, 2, 1, 3)),
    ("caption/project", (0, 1), (1, 2)),
    ("classify/fuse", (0, 1), (3, 0, 1, 2)),
)


# Matrices that all four devices, three and two of them hold, in shares of different sizes.
GATHERED: tuple[Placement, ...] = (
    ("large/embed", (0, 1), (2, 0, 1)),
    ("small/embed", (0, 1), (3, 1)),
    ("large/wide", (0, 1), (1, 3)),
    ("small/wide", (0, 1), (3,)),
    ("large/head", (0, 1), (0, 2)),
    ("small/head", (0, 1), (1,)),
)


# All of a task with a decoder, one tower of another, and a MetaOp that hands on a value without a batch
# dimension.
RECOMPUTED = (
    "pairs/vision",
    "caption/vision",
    "caption/center",
    "caption/layers",
    "caption/project",
    "classify/mix",
)


# Steps of three tasks, by the plan of all; of one, by what is left of it; and of two, on other devices and in
# other shares.
SAMPLED = {
    **SGD,
    "optimizer_args": {"momentum": 0.9, "weight_decay": 0.1},
    "clip_norm": 0.5,
    "accumulate": 2,
    "sampling": {"every": {"classify": 2, "caption": 3}},
}
SETS = {
    "pairs": None,
    "pairs+classify": [
        ("pairs/vision", (0, 4), (3, 2)),
        ("pairs/text", (0, 3), (0, 2)),
        ("classify/vision", (0, 4), (1, 0)),
        ("classify/text", (0, 3), (2, 3)),
        ("pairs/contrast", (0, 1), (0,)),
        ("classify/mix", (0, 1), (3,)),
        ("classify/mix-2", (0, 1), (3,)),
        ("classify/fuse", (0, 1), (2, 1)),
    ],
    "pairs+caption": None,
}
# One task a step, stepped by what keeps two moments of each element.
DRAWN = {
    **ADAMW,
    "sampling": {"draw": {"weights": {"pairs": 3.0, "classify": 1.0, "caption": 2.0}, "seed": 4}},
}
ONE_BY_ONE = {
    "pairs": None,
    "classify": None,
    "caption": [
        ("caption/vision", (0, 4), (1, 3)),
        ("caption/center", (0, 1), (1,)),
        ("caption/layers", (0, 3), (3, 0)),
        ("caption/project", (0, 1), (2,)),
    ],
}
# SGD, so that the size of the gradients matters; their norm is about 4. Momentum moves with the schedule.
CLIPPED = {
    **SGD,
    "optimizer_args": {"momentum": 0.9},
    "clip_norm": 0.5,
    "schedule": {"name": "OneCycleLR", "max_lr": 0.1, "total_steps": 5},
}
# The same, of each element: about as many are larger as are not.
CLIPPED_BY_VALUE = {key: value for key, value in CLIPPED.items() if key != "clip_norm"} | {"clip_value": 0.02}


def scatter_at_random(seed: int, num_devices: int, graph: WorkloadGraph) -> tuple[Placement, ...]:
    """A random plan: each MetaOp cut at random, each part on random devices in random order."""
    draw = random.Random(seed)
    placements: list[Placement] = []
    for metaop in graph.metaops:
        batch_size = graph.tasks[metaop.task].task.batch_size
        most = 1 if metaop.coupled else num_devices
        degrees = [count for count in range(1, most + 1) if batch_size % count == 0]
        first = 0
        while first < len(metaop.ops):
            last = draw.randint(first + 1, len(metaop.ops))
            devices = draw.sample(range(num_devices), draw.choice(degrees))
            placements.append((metaop.name, (first, last), tuple(devices)))
            first = last
    return tuple(placements)


FROZEN = {"frozen_tower": True}
# A run that is cut short after its second step, and goes on by the same plan and by others.
SAVED = Case("saved", SCATTERED, args=FROZEN, train=ADAMW, steps=2, checkpoint_every=1)
WHOLE_STATE = {**ADAMW, "shard_optimizer": False}
SAVED_WHOLE = Case("saved-whole", SCATTERED, args=FROZEN, train=WHOLE_STATE, steps=2, checkpoint_every=1)
GONE_ON = Case("gone-on", SCATTERED, args=FROZEN, train=ADAMW, goes_on_with=SAVED.name)
# Two of four groups are stepped in ranges, two whole.
GROUPED = {
    "optimizer": "AdamW",
    "lr": 1e-2,
    "optimizer_args": {"weight_decay": 0.5},
    "clip_norm": 0.5,
    "schedule": {
        "name": "LambdaLR",
        "lr_lambda": [f"runtime_toys:{name}" for name in ("halved", "halved", "slower", "halved")],
    },
    "groups": [
        "no_decay",
        {"name": "heads", "parameters": ["caption.*"], "kinds": ["matrices"], "optimizer": "Muon"},
        {
            "name": "towers",
            "modules": ["Linear"],
            "kinds": ["matrices"],
            "excluding": ["caption.*"],
            "lr": 3e-2,
        },
        {"name": "others", "rest": True, "optimizer": "Adafactor", "lr": 1e-3},
    ],
}
FADING = {"pairs": [[0, 2.0], [2, 0.5]], "caption": [[1, 1.0], [2, 3.0]]}
SAVED_GROUPED = Case("saved-grouped", SCATTERED, train=GROUPED, steps=2, checkpoint_every=1)
# By index and as streams, with and without a state, by loader workers; cut short in the middle of an epoch.
BY_WORKERS = {"toys": "../helpers/data_toys", "train": {**SGD, "loader": {"workers": 1}}}
SAVED_LOADED = Case("saved-loaded", (1, 3), steps=2, checkpoint_every=1, **BY_WORKERS)
# Data that change from epoch to epoch, cut short in the middle of one's second and another's third.
BY_EPOCHS = {
    "toys": "item_toys",
    "function": "build_epochs",
    "train": {**SGD, "accumulate": 2, "loader": {"workers": 0, "tasks": {"loaded": {"workers": 2}}}},
}
SAVED_EPOCHS = Case("saved-epochs", (1, 3), steps=2, checkpoint_every=1, **BY_EPOCHS)
SAVED_SAMPLED = Case("saved-sampled", SCATTERED, train=SAMPLED, sets=SETS, steps=2, checkpoint_every=1)
LEFT = dict.fromkeys(SETS)
GONE_ON_ELSEWHERE = (
    Case("gone-on-sampled", (2, 0), train=SAMPLED, sets=LEFT, goes_on_with=SAVED_SAMPLED.name),
    Case("gone-on-loaded", (2, 0), goes_on_with=SAVED_LOADED.name, **BY_WORKERS),
    Case("gone-on-epochs", (2, 0), goes_on_with=SAVED_EPOCHS.name, **BY_EPOCHS),
    Case("gone-on-grouped", (3, 0), train=GROUPED, goes_on_with=SAVED_GROUPED.name),
    Case(
        "gone-on-elsewhere",
        partial(scatter_at_random, 0, 4),
        args=FROZEN,
        train=ADAMW,
        apart=2,
        goes_on_with=SAVED.name,
    ),
    Case(
        "gone-on-uneven",
        SCATTERED,
        args=FROZEN,
        train=ADAMW,
        uneven=True,
        apart=9,
        weights=(3, 1, 1, 2),
        goes_on_with=SAVED.name,
    ),
    Case("gone-on-on-two", (3, 1), args=FROZEN, train=ADAMW, goes_on_with=SAVED.name),
    Case("gone-on-whole", SCATTERED, args=FROZEN, train=WHOLE_STATE, goes_on_with=SAVED.name),
    Case("gone-on-on-one", (2,), args=FROZEN, train=ADAMW, goes_on_with=SAVED.name, long=True),
    Case(
        "gone-on-in-pieces",
        (1, 0),
        args=FROZEN,
        train=ADAMW,
        weights=(5, 2, 1, 1),
        goes_on_with=SAVED_WHOLE.name,
    ),
    Case("gone-on-not-shared-out", SCATTERED, args=FROZEN, train=ADAMW, goes_on_with=SAVED_SHARED_OUT.name),
    Case(
        "gone-on-without-replica_groups",
        SCATTERED,
        args=FROZEN,
        train=ADAMW,
        goes_on_with=SAVED_BY_TEAMS.name,
    ),
    Case(
        "gone-on-by-replica_groups",
        ON_TEAMS,
        args=FROZEN,
        train=ADAMW,
        apart=15,
        sharding=Sharding.PARAMETERS,
        goes_on_with=SAVED.name,
    ),
    Case(
        "gone-on-shared-out",
        ON_SOME,
        train=GROUPED,
        apart=6,
        sharding=Sharding.PARAMETERS,
        goes_on_with=SAVED_GROUPED.name,
    ),
)
# Runs that begin with what another one has trained, on other tasks or by other settings.
WITHOUT_PAIRS = Case(
    "without-pairs",
    (0, 1, 2, 3),
    args={"tasks": ["classify", "caption"]},
    train=ADAMW,
    steps=2,
    checkpoint_every=2,
)
WITH_ALL = Case("with-all", SCATTERED, train=ADAMW, steps=2, checkpoint_every=2)
HALVING = {**ADAMW, "lr": 0.02, "schedule": {"name": "StepLR", "step_size": 1, "gamma": 0.5}}
CHANGED = (
    Case("task-added", SCATTERED, train=ADAMW, steps=4, begins_from=WITHOUT_PAIRS.name),
    Case(
        "task-ended",
        (2, 1),
        args={"tasks": ["classify", "caption"]},
        train=ADAMW,
        steps=4,
        begins_from=WITH_ALL.name,
    ),
    Case(
        "settings-changed",
        (3, 1),
        args={"caption_batch": 2, "reduction": "sum"},
        train=HALVING,
        steps=4,
        begins_from=WITH_ALL.name,
    ),
)
EXACT_ON_FOUR = (
    Case("scattered", SCATTERED),
    Case("scattered-float32", SCATTERED, train=ADAMW, dtype="float32", long=True),
    Case("summed-loss", SCATTERED, args={"reduction": "sum"}, long=True),
    Case("frozen-tower", SCATTERED, args=FROZEN, train=ADAMW),
    Case("clipped", SCATTERED, args=FROZEN, train=CLIPPED, steps=2),
    Case("replicated", SCATTERED, args=FROZEN, train={**CLIPPED, "shard_optimizer": False}, steps=2),
    Case("in-pieces", (2, 0, 3, 1), train={"optimizer": "NAdam", "lr": 1e-3, "clip_norm": 0.5}, steps=2),
    Case("grouped", SCATTERED, train={**GROUPED, "accumulate": 2, "task_weights": FADING}),
    Case("not-elementwise", SCATTERED, train={"optimizer": "Adafactor", "lr": 1e-2}, long=True),
    Case("accumulated", SCATTERED, args=FROZEN, train={**CLIPPED, "accumulate": 3}, apart=0, steps=2),
    Case("accumulated-sum", (1, 2), args={"reduction": "sum"}, train={**ADAMW, "accumulate": 2}, long=True),
    Case("recomputed", SCATTERED, train=ADAMW, recompute=RECOMPUTED, apart=1, long=True),
    Case("cut", SCATTERED, train=ADAMW, micro_batches={"classify": 2}, apart=4, long=True),
    Case(
        "cut-summed",
        SCATTERED,
        args={"reduction": "sum"},
        train={**CLIPPED, "accumulate": 2},
        offload=True,
        recompute=RECOMPUTED,
        selective=True,
        micro_batches={"classify": 6},
        apart=5,
        steps=2,
    ),
    Case(
        "uneven",
        SCATTERED,
        args=FROZEN,
        train={**CLIPPED, "accumulate": 2},
        offload=True,
        recompute=RECOMPUTED,
        micro_batches={"classify": 2},
        uneven=True,
        apart=7,
        steps=2,
    ),
    Case(
        "uneven-summed",
        SCATTERED,
        args={"reduction": "sum"},
        train=ADAMW,
        uneven=True,
        apart=8,
        weights=(1, 4, 2, 3),
        steps=2,
    ),
    Case("sampled", SCATTERED, train=SAMPLED, sets=SETS),
    Case("sampled-drawn", SCATTERED, train=DRAWN, sets=ONE_BY_ONE),
    Case("gathered", GATHERED, toys="../helpers/rows_toy", train=ADAMW, gathers=True, steps=2),
    Case(
        "gathered-clipped",
        GATHERED,
        toys="../helpers/rows_toy",
        train={**CLIPPED, "accumulate": 2},
        recompute=("large/embed", "small/wide"),
        micro_batches={"large": 3},
        uneven=True,
        apart=10,
        gathers=True,
        steps=2,
    ),
    # Steps that run some of the tasks, by plans that do what only plans of all tasks did once.
    case_of(("task-sets", "micro-batches", "parameters")),
    case_of(("task-sets", "rows", "gradients")),
    case_of(("task-sets", "gathered", "homes")),
    Case("random-0", partial(scatter_at_random, 0, 4), train=ADAMW, long=True),
    Case("random-3", partial(scatter_at_random, 3, 4), train=ADAMW, apart=3, weights=(1, 1, 1, 30), steps=2),
    *NORMED,
    *WHOLE,
    *CONTRASTED,
    *LENGTHS,
    *GRADIENTS,
    *SHARED_OUT,
    *BY_TEAMS,
    STATE_WHOLE,
)
ON_FOUR = (
    *EXACT_ON_FOUR,
    SAVED,
    SAVED_WHOLE,
    SAVED_GROUPED,
    SAVED_LOADED,
    SAVED_EPOCHS,
    SAVED_SAMPLED,
    SAVED_SHARED_OUT,
    SAVED_BY_TEAMS,
    GONE_ON,
    *GONE_ON_ELSEWHERE,
    WITHOUT_PAIRS,
    WITH_ALL,
    *CHANGED,
)
# The fields of a sample are read on different devices.
APART: tuple[Placement, ...] = (
    ("pairs/vision", (0, 4), (0,)),
    ("pairs/text", (0, 3), (1,)),
    ("classify/vision", (0, 4), (1,)),
    ("classify/text", (0, 3), (0,)),
    ("caption/vision", (0, 4), (0,)),
    ("pairs/contrast", (0, 1), (1,)),
    ("classify/mix", (0, 1), (0, 1)),
    ("classify/mix-2", (0, 1), (1,)),
    ("caption/center", (0, 1), (0,)),
    ("caption/layers", (0, 3), (1,)),
    ("caption/project", (0, 1), (1, 0)),
    ("classify/fuse", (0, 1), (1, 0)),
)
EXACT_ON_TWO = (
    Case("all-on-two", (0, 1), train=ADAMW, dtype="float32"),
    Case(
        "compiled",
        APART,
        train={**ADAMW, "compile": "aot_eager"},
        offload=True,
        recompute=("pairs/vision", "caption/layers"),
        steps=2,
    ),
    Case("drawn-data", APART, args={"draws": True}, train={**ADAMW, "accumulate": 2}, steps=2),
    Case("absent-images", (0, 1), toys="../helpers/absent_toys", train=ADAMW, steps=2),
    Case("guards", (0, 1), toys="guard_toys", train={**SGD, "loader": {"workers": 1}}, steps=2),
    Case("kept", (0, 1), toys="kept_toys", train={**SGD, "eval_every": 1}, recompute=("t/student",)),
    Case(
        "kept-saved", (1, 0), toys="kept_toys", args={"saved": True}, micro_batches={"t": 2}, apart=2, steps=2
    ),
    Case("saving", (0, 1), toys="saving_toys", train=ADAMW, recompute=("t/first",), offload=True, steps=2),
    Case("guards-compiled", (0, 1), toys="guard_toys", train={**SGD, "compile": "aot_eager"}, steps=2),
    Case("all-on-second", (1,), train={"optimizer": "RMSprop", "lr": 1e-3}, steps=2),
)
DIVERGING = Case("diverging", (0, 1), train={"optimizer": "SGD", "lr": 1e300})
UNSEEDED = Case("unseeded", (0, 1), function="build_anew")


def place_broken(graph: WorkloadGraph) -> tuple[Placement, ...]:
    """All of it on one device, but for the layer that fails."""
    apart: tuple[Placement, ...] = (("pairs/vision", (0, 3), (0,)), ("pairs/vision-2", (0, 1), (1,)))
    return (*apart, *whole(graph, (0,))[2:])


BROKEN = Case("broken", place_broken, function="build_broken")
ON_TWO = (*EXACT_ON_TWO, OWN_NOISE, DIVERGING, UNSEEDED, BROKEN)
