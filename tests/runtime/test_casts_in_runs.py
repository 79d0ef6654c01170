"""Runs that keep casts of weights from pass to pass train what runs do that cast them anew in every pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import run_case, world_of_one
from case_runs import Case, captured, prepare
from hand_plans import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.torch_versions import keeps_casts
from spindle_cli.files.run_files import read_metrics
from spindle_cli.files.sharding import Sharding
from spindle_cli.verify.run import verify_plan
from spindle_cli.verify.types import SPLIT_GRADIENT_TOLERANCE, VerifyOptions

# Two tasks share a tower. Each batch of them is cut into micro-batches, whose passes come in any order.
CUT = {"describe": 2, "translate": 2}
TRAIN = {"precision": "bf16-autocast", "optimizer": "AdamW", "lr": 1e-3, "clip_norm": 1.0, "accumulate": 2}
BY_PARTS = {key: value for key, value in TRAIN.items() if key != "clip_norm"}
ON_TWO: tuple[Placement, ...] = (
    ("describe/tower", (0, 4), (0, 1), 2),
    ("translate/tower", (0, 4), (0, 1), 2),
    ("translate/layers", (0, 2), (0, 1)),
    ("write/layers", (0, 2), (1, 0), 2),
)


class Casts(TorchDispatchMode):
    """Counts what is cast of float32 matrices of the tower's width."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].shape == (64, 64):
            self.count += args[0].dtype == torch.float32
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Casts]:
    with world_of_one(), Casts() as casts:
        yield casts


@keeps_casts
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"apart": 1}, id="apart"),
        pytest.param({"apart": 2, "by_parts": True, "train": BY_PARTS}, id="by parts"),
        pytest.param({"apart": 3, "train": {**TRAIN, "accumulate": 1, "ema": {"decay": 0.5}}}, id="average"),
    ],
)
def test_gradients_and_parameters_are_the_same_to_the_last_bit(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"train": TRAIN, "toys": "memory_toys", "dtype": None, "micro_batches": CUT, **changes}
    counts = []
    for name in ("kept", "anew"):
        if name == "anew":
            monkeypatch.setattr("spindle_cli.runtime.step.casts.keeps_gradients", lambda: False)
        with counted() as casts:
            run_case(Case(name, (0,), steps=2, **settings), tmp_path / name)
        counts.append(casts.count)
    kept, anew = tmp_path / "kept", tmp_path / "anew"
    losses = [[line.task_losses for line in read_metrics(folder)] for folder in (kept, anew)]
    assert losses[0] == losses[1]
    for stage in ("gradients", "final"):
        (found,), (expected,) = (captured(folder, stage, 1) for folder in (kept, anew))
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
    assert counts[0] < counts[1]


def test_where_all_is_recomputed_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    case = Case(
        "again",
        (0,),
        "memory_toys",
        train=TRAIN,
        dtype=None,
        micro_batches=CUT,
        apart=1,
        steps=1,
        recompute=("describe/tower",),
    )
    for name in ("kept", "anew"):
        if name == "anew":
            monkeypatch.setattr("spindle_cli.runtime.step.casts.keeps_gradients", lambda: False)
        with counted() as casts:
            run_case(case, tmp_path / name)
        counts.append(casts.count)
    assert counts[0] == counts[1]


@pytest.mark.processes
@pytest.mark.usefixtures("ready_pythons")
@pytest.mark.parametrize("sharding", [None, Sharding.GRADIENTS, Sharding.PARAMETERS], ids=str)
def test_split_and_shared_out_they_train_what_plain_pytorch_does(
    sharding: Sharding | None, tmp_path: Path
) -> None:
    folder = tmp_path / "case"
    prepare(
        Case("casts", ON_TWO, "memory_toys", train=TRAIN, micro_batches=CUT, apart=4, sharding=sharding),
        2,
        folder,
    )
    source = str(folder / "workload.yaml")
    report = verify_plan(folder / "plan.yaml", source, VerifyOptions(steps=2), lambda line: None)
    assert report.same, report
    differences = {check.what: check.largest.relative for check in report.checks if check.largest is not None}
    found = differences["gradients of step 1"] or 0.0
    assert 1e-4 < found < SPLIT_GRADIENT_TOLERANCE["bf16-autocast"]


@pytest.mark.processes
@pytest.mark.usefixtures("ready_pythons")
@pytest.mark.parametrize("order", [1, 4])
def test_sums_that_start_op_by_op_have_the_whole_gradient(order: int, tmp_path: Path) -> None:
    """Of casts that an earlier pass has made it would be complete behind all ops of the pass."""
    folder = tmp_path / "case"
    prepare(Case("sums", (0, 1), "memory_toys", train=TRAIN, micro_batches=CUT, apart=order), 2, folder)
    source = str(folder / "workload.yaml")
    report = verify_plan(folder / "plan.yaml", source, VerifyOptions(steps=2), lambda line: None)
    assert report.same, report
