"""The cases of four workers that evaluate what they train, and more."""

from __future__ import annotations

from case_runs import ADAMW, Case
from contrast_cases import COMPARED
from mixed_cases import MATCH, TOYS, WRITE
from split_cases import SPLIT

from spindle_cli.files.sharding import Sharding

EVERY_TWO = {**ADAMW, "eval_every": 2, "seed": 3}
EVERY_STEP = {**EVERY_TWO, "eval_every": 1}
# Every share cut by the last batch, one of them to nothing; slices on other devices than their inputs.
SCATTERED = (
    ("classify/layers", (0, 1), (0, 2, 1, 3)),
    ("classify/layers", (1, 3), (3, 1)),
    ("classify/head", (0, 1), (0, 1, 2, 3)),
    ("pairs/layers", (0, 1), (2,)),
    ("pairs/layers-2", (0, 2), (1, 0)),
    ("pairs/other", (0, 1), (3, 2, 1, 0)),
    ("pairs/other-2", (0, 1), (2, 3)),
    ("pairs/loss", (0, 1), (1,)),
)
TRAIN = {**EVERY_TWO, "clip_norm": 0.5}
OFTEN = {**EVERY_STEP, "clip_norm": 0.5}
AVERAGED = {**TRAIN, "ema": {"decay": 0.5}}
# Layers of both tasks on all devices, which share their parameters out; a share of the last batch is empty.
TOGETHER = (
    ("classify/layers", (0, 1), (0, 2, 1, 3)),
    ("classify/layers", (1, 3), (3, 1, 0, 2)),
    ("classify/head", (0, 1), (0, 1, 2, 3)),
    ("pairs/layers", (0, 1), (2,)),
    ("pairs/layers-2", (0, 2), (1, 0, 2, 3)),
    ("pairs/other", (0, 1), (3, 2, 1, 0)),
    ("pairs/other-2", (0, 1), (2, 3)),
    ("pairs/loss", (0, 1), (1,)),
)
# The layer that a task uses twice by two replica groups.
BY_TEAMS = (
    *TOGETHER[:-3],
    ("pairs/other", (0, 1), (3, 2)),
    ("pairs/other-2", (0, 1), (0, 1)),
    TOGETHER[-1],
)
# What all layers take is computed with the first one, and devices of the others have nothing of that.
FROM_ONE = (
    ("score/layers", (0, 1), (0, 2)),
    ("score/layers-2", (0, 1), (1,)),
    ("score/layers-2", (1, 2), (3, 1)),
)
FIRST_VALUES = tuple(
    Case(f"first-{kind}", FROM_ONE, "eval_glue_toys", args={"kind": kind}, train=OFTEN, steps=2)
    for kind in ("norm", "running", "dropout")
)
ON_FOUR = (
    *FIRST_VALUES,
    Case(
        "first-shared-out",
        (("score/layers", (0, 1), (0, 1, 2, 3)), ("score/layers-2", (0, 2), (0, 1, 2, 3))),
        "eval_glue_toys",
        train=OFTEN,
        steps=2,
        apart=5,
        sharding=Sharding.PARAMETERS,
    ),
    Case("watched", SCATTERED, "eval_toys", train=TRAIN),
    Case("unwatched", SCATTERED, "eval_toys", args={"evaluates": False}, train=TRAIN),
    Case("tensor-split", SPLIT, "eval_split_toys", train=EVERY_STEP, steps=2),
    Case("streamed", SCATTERED, "eval_toys", args={"streams": True}, train=TRAIN, uneven=True, apart=1),
    Case(
        "contrasts",
        COMPARED,
        "contrast_toys",
        "build_evaluated",
        train=EVERY_STEP,
        steps=2,
        uneven=True,
        apart=2,
    ),
    Case(
        "looked-at",
        COMPARED,
        "contrast_toys",
        "build_evaluated",
        {"looked_at": True},
        train=EVERY_STEP,
        steps=2,
    ),
    Case("only-evaluated", SCATTERED, "only_evaluated_toys", train=TRAIN),
    Case(
        "only-evaluated-split",
        SPLIT,
        "only_evaluated_toys",
        "build_split",
        train=EVERY_STEP,
        steps=2,
        uneven=True,
        apart=3,
    ),
    Case(
        "shared-out",
        TOGETHER,
        "only_evaluated_toys",
        train=TRAIN,
        apart=3,
        sharding=Sharding.PARAMETERS,
        long=True,
    ),
    Case(
        "by-replica_groups",
        BY_TEAMS,
        "only_evaluated_toys",
        train=OFTEN,
        steps=2,
        apart=4,
        sharding=Sharding.PARAMETERS,
    ),
    Case("averaged", BY_TEAMS, "eval_toys", train=AVERAGED, apart=4),
    Case(
        "averaged-by-replica_groups",
        BY_TEAMS,
        "eval_toys",
        train=AVERAGED,
        apart=4,
        sharding=Sharding.PARAMETERS,
    ),
    Case(
        "lengths",
        (*WRITE, *MATCH),
        args={"tasks": ["write", "match"], "held_out": 15},
        steps=2,
        train=EVERY_STEP,
        **TOYS,
    ),
)
