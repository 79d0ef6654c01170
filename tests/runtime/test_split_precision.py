"""Layers split by tensor parallelism train in bfloat16 what plain PyTorch does, to bfloat16's tolerance."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from case_runs import Case, prepare
from hand_plans import Placement

from spindle_cli.verify.run import verify_plan
from spindle_cli.verify.types import SPLIT_GRADIENT_TOLERANCE, VerifyOptions

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ready_pythons")]

# Split, then whole on one device or spread over the batch, for the same parameters; half of it recomputed.
ON_TWO: tuple[Placement, ...] = (
    ("describe/tower", (0, 2), (0, 1), 2),
    ("describe/tower", (2, 4), (1, 0)),
    ("translate/tower", (0, 4), (1, 0), 2),
    ("translate/layers", (0, 1), (0,)),
    ("translate/layers", (1, 2), (0, 1), 2),
    ("write/layers", (0, 2), (1, 0), 2),
)


# Two optimizers, and a group without decay, over parameters of which ranks hold halves; and their averages.
UPDATED = {
    "groups": [
        "no_decay",
        {
            "name": "towers",
            "parameters": ["*.tower.*"],
            "kinds": ["matrices"],
            "optimizer": "SGD",
            "lr": 1e-2,
        },
        "rest",
    ],
    "ema": {"decay": 0.5},
}


@pytest.mark.parametrize("precision", ["bf16-autocast", pytest.param("bf16", marks=pytest.mark.long)])
def test_split_layers_train_in_bfloat16_what_plain_pytorch_does(
    precision: Literal["bf16-autocast", "bf16"], tmp_path: Path
) -> None:
    train = {
        "precision": precision,
        "clip_norm": 1.0,
        "accumulate": 2,
        "optimizer": "AdamW",
        "lr": 1e-3,
        **UPDATED,
    }
    recompute = ("describe/tower", "translate/layers")
    case = Case(precision, ON_TWO, "memory_toys", train=train, recompute=recompute)
    prepare(case, 2, tmp_path / "case")
    source = str(tmp_path / "case" / "workload.yaml")
    report = verify_plan(tmp_path / "case" / "plan.yaml", source, VerifyOptions(steps=2), lambda line: None)
    assert report.same, report
    differences = {check.what: check.largest.relative for check in report.checks if check.largest is not None}
    assert differences["initial parameters"] == 0
    assert 1e-4 < (differences["gradients of step 1"] or 0.0) < SPLIT_GRADIENT_TOLERANCE[precision]
