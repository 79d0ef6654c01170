"""Cases of parameters that get no gradient, by whatever way, and of operators that ask for gradients."""

from __future__ import annotations

from case_runs import ADAMW, SGD, Case
from hand_plans import Placement

from spindle_cli.files.sharding import Sharding

CLIPPED = {**SGD, "optimizer_args": {"momentum": 0.9, "weight_decay": 0.5}, "clip_norm": 0.05}
# Every value goes to other devices than those that made it, in other shares.
_CUT: tuple[Placement, ...] = (
    ("cut/first", (0, 1), (0, 1)),
    ("cut/first-2", (0, 1), (2,)),
    ("cut/two", (0, 1), (3, 1)),
    ("cut/behind", (0, 1), (0,)),
    ("cut/source", (0, 1), (1, 2, 3, 0)),
    ("cut/no_grad", (0, 1), (2, 3)),
    ("cut/quiet", (0, 2), (3, 0)),
    ("cut/quiet-2", (0, 1), (1,)),
    ("cut/quiet-2", (1, 2), (0, 2)),
    ("cut/stopped", (0, 1), (1,)),
    ("cut/last", (0, 1), (0, 3)),
    ("cut/loss", (0, 1), (0, 3)),
)
_WITH_OTHER: tuple[Placement, ...] = (*_CUT, ("other/first", (0, 2), (1, 0)))
# What the judge gives no gradient for is on other devices, in other shares.
_JUDGED: tuple[Placement, ...] = (
    ("judged/pair", (0, 1), (1, 2)),
    ("judged/first", (0, 1), (0, 1)),
    ("judged/never", (0, 1), (2, 3)),
    ("judged/sometimes", (0, 1), (3, 0)),
    ("judged/sometimes", (1, 2), (1, 2)),
    ("judged/judge", (0, 1), (0,)),
)
_ASKING: tuple[Placement, ...] = (
    ("ask/flows", (0, 2), (0, 1)),
    ("ask/flows", (2, 3), (1, 0)),
    ("ask/learned", (0, 1), (2, 3, 0, 1)),
    ("ask/last", (0, 1), (3, 2)),
)
# The flows ask for gradients by what the op before them, in the same slice, has made.
_ASKING_TOGETHER: tuple[Placement, ...] = (
    ("ask/flows", (0, 3), (0, 1)),
    ("ask/learned", (0, 1), (2,)),
    ("ask/last", (0, 1), (0, 1)),
)
ASKS = {"toys": "gradient_toys", "function": "build_asking"}
OWN_NOISE = Case(
    "own-noise",
    (0, 1),
    toys="gradient_toys",
    function="build_noisy",
    train={**SGD, "accumulate": 2},
    recompute=("noisy/noise",),
    apart=2,
    steps=2,
)
GRADIENTS = (
    Case("no-gradient", _CUT, toys="gradient_toys", train=ADAMW, steps=2),
    Case(
        "no-gradient-shared-out",
        (0, 1),
        toys="gradient_toys",
        args={"with_other": True},
        train={**CLIPPED, "accumulate": 2},
        recompute=("cut/quiet-2", "cut/no_grad"),
        micro_batches={"cut": 2},
        apart=1,
        sharding=Sharding.PARAMETERS,
        steps=2,
    ),
    Case(
        "no-gradient-sampled",
        _WITH_OTHER,
        toys="gradient_toys",
        args={"with_other": True},
        train={**CLIPPED, "sampling": {"every": {"other": 2}}},
        sets={"cut+other": None, "cut": None},
    ),
    Case(
        "no-gradient-judged",
        _JUDGED,
        toys="whole_toys",
        function="build_judged",
        train=ADAMW,
        recompute=("judged/sometimes", "judged/judge"),
        apart=2,
        steps=6,
    ),
    Case(
        "no-gradient-judged-shared-out",
        (0, 1),
        toys="whole_toys",
        function="build_judged",
        train={**CLIPPED, "accumulate": 2},
        apart=3,
        sharding=Sharding.PARAMETERS,
        steps=4,
    ),
    Case("asking", _ASKING, train=ADAMW, recompute=("ask/flows",), apart=3, long=True, **ASKS),
    Case(
        "asking-offloaded",
        (0, 1),
        train={**CLIPPED, "accumulate": 2},
        offload=True,
        by_parts=True,
        long=True,
        **ASKS,
    ),
    Case(
        "asking-shared-out",
        _ASKING_TOGETHER,
        train={**CLIPPED, "accumulate": 2},
        recompute=("ask/flows", "ask/learned"),
        micro_batches={"ask": 2},
        apart=4,
        sharding=Sharding.PARAMETERS,
        steps=2,
        **ASKS,
    ),
)
