"""Real processes train in float16 autocast what plain PyTorch trains with its own GradScaler: the same steps
are skipped, and the same scale goes on from a checkpoint.
"""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
import torch
from case_runs import Case, captured, prepare, run_cases
from hand_plans import Placement
from shard_cases import ON_SOME
from test_split_precision import ON_TWO, UPDATED

from spindle_cli.checkpoint.files import find_checkpoint
from spindle_cli.files.run_files import read_metrics
from spindle_cli.files.sharding import Sharding
from spindle_cli.verify.run import verify_plan
from spindle_cli.verify.types import TOLERANCE, VerifyOptions, VerifyReport

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ready_pythons")]

TRAIN = {"precision": "fp16-autocast", "clip_norm": 1.0, "accumulate": 2, "optimizer": "AdamW", "lr": 1e-3}
# Far too large at first: three steps or more are skipped.
TOO_LARGE = {"init_scale": 2.0**36, "backoff_factor": 2.0**-8}


def verified(case: Case, num_devices: int, steps: int, folder: Path) -> VerifyReport:
    prepare(case, num_devices, folder)
    source = str(folder / "workload.yaml")
    report = verify_plan(folder / "plan.yaml", source, VerifyOptions(steps=steps), lambda line: None)
    assert report.same, [(check.what, check.failures) for check in report.checks if not check.passed]
    assert report.dtype == "fp16-autocast"
    return report


def test_split_layers_and_losses_in_chunks_train_what_plain_pytorch_does(tmp_path: Path) -> None:
    """Whole and halved layers, some recomputed; the logits of one task in chunks, in float16 taken twice."""
    train = {**TRAIN, "loss_chunks": 4, **UPDATED}
    case = Case("split", ON_TWO, "memory_toys", train=train, recompute=("describe/tower", "translate/layers"))
    report = verified(case, 2, 2, tmp_path / "case")
    sizes = {check.what: check.largest.relative for check in report.checks if check.largest is not None}
    assert sizes["loss scales"] == 0
    # It did compute in float16: float32 would differ by a ten-thousandth of this, bfloat16 by eight times.
    assert 2e-5 < (sizes["gradients of step 1"] or 0.0) < TOLERANCE["fp16-autocast"] * 2.5


@pytest.mark.parametrize(
    "sharding", [Sharding.PARAMETERS, pytest.param(Sharding.GRADIENTS, marks=pytest.mark.long)]
)
def test_parts_in_micro_batches_that_are_shared_out_skip_what_plain_pytorch_skips(
    sharding: Sharding, tmp_path: Path
) -> None:
    """Frozen parts too. Some ranks hold parameters that others do not."""
    case = Case(
        "shared-out",
        ON_SOME,
        args={"frozen_tower": True},
        train={**TRAIN, "loss_scale": TOO_LARGE},
        micro_batches={"classify": 2},
        apart=3,
        sharding=sharding,
    )
    report = verified(case, 4, 5, tmp_path / "case")
    scales = next(check for check in report.checks if check.what == "loss scales")
    assert scales.compared == 5


# Two tasks without a parameter in common, each on a device of its own.
APART: tuple[Placement, ...] = (
    ("translate/tower", (0, 4), (0,)),
    ("translate/layers", (0, 2), (0,)),
    ("describe/tower", (0, 4), (0,)),
    ("write/layers", (0, 2), (1,)),
)


MOMENTUM = {"momentum": 0.9}
WRITTEN = {"parameters": ["write.*"], "lr": 1e-2}
# Two that leave a step out by themselves, of which each has parameters of both tasks.
MLPS = {"optimizer": "SGD", "optimizer_args": MOMENTUM}
BY_THEMSELVES = [
    {"name": "write mlp", "parameters": ["write.*.mlp.*"], **MLPS},
    {"name": "mlp", "parameters": ["*.mlp.*"], "excluding": ["write.*"], **MLPS},
    {"name": "write", **WRITTEN, "excluding": ["*.mlp.*"]},
    "rest",
]
ASKED = [{"name": "write", **WRITTEN}, "rest"]


@pytest.mark.parametrize(
    ("optimizer", "groups"),
    [
        pytest.param("AdamW", BY_THEMSELVES, id="AdamW and SGD"),
        pytest.param("NAdam", ASKED, id="NAdam", marks=pytest.mark.long),
    ],
)
def test_what_overflows_on_one_device_alone_is_skipped_by_all(
    optimizer: str, groups: list[object], tmp_path: Path
) -> None:
    """The weight of one task makes its gradients overflow in the steps 2 and 3; the other task's are small.
    Each task's parameters are in optimizer groups of their own.
    """
    weights = {"write": [[0, 1.0], [1, 1e9], [2, 1e9], [3, 1.0]]}
    train = {
        "precision": "fp16-autocast",
        "loss_scale": 256,
        "task_weights": weights,
        "optimizer": optimizer,
        "lr": 1e-3,
        "groups": groups,
    }
    folder = tmp_path / "case"
    prepare(Case("apart", APART, "memory_toys", train=train), 2, folder)
    options = VerifyOptions(steps=5, run_dir=tmp_path / "runs")
    report = verify_plan(folder / "plan.yaml", str(folder / "workload.yaml"), options, lambda line: None)
    assert report.same, report
    lines = list(read_metrics(tmp_path / "runs" / "plan"))
    assert [line.skipped for line in lines] == [False, True, True, False, False]
    assert {line.loss_scale for line in lines} == {256.0}


def scaled(
    name: str, placements: tuple[Placement, ...] | tuple[int, ...], steps: int, **changes: str
) -> Case:
    """Scales fall from 2^36 by 256, and grow by 2 after two steps in which nothing overflows."""
    train = {**TRAIN, "loss_scale": {**TOO_LARGE, "growth_interval": 2}}
    return Case(
        name,
        placements,
        train=train,
        dtype=None,
        steps=steps,
        checkpoint_every=1,
        goes_on_with=changes.get("goes_on_with"),
    )


def lines_of(folder: Path) -> list[tuple[float | None, bool | None]]:
    return [(line.loss_scale, line.skipped) for line in read_metrics(folder)]


def test_the_scale_goes_on_by_the_same_plan_and_on_fewer_ranks(forker: socket.socket, tmp_path: Path) -> None:
    """Cut off while the scale still falls; then by the same plan, and by another on two of four devices."""
    four, two, again, steps = tmp_path / "four", tmp_path / "two", tmp_path / "again", 6
    four.mkdir()
    cases = [scaled("whole", ON_SOME, steps), scaled("cut", ON_SOME, 2)]
    run_cases(forker, cases, 4, four, fails=False)
    for folder in (two, again):
        shutil.copytree(four / "cut" / "checkpoints", folder / "cut" / "checkpoints")
    run_cases(forker, [scaled("fewer", (0, 1), steps, goes_on_with="cut")], 2, two, fails=False)
    run_cases(forker, [scaled("same", ON_SOME, steps, goes_on_with="cut")], 4, again, fails=False)
    expected = lines_of(four / "whole")
    assert expected[:3] == [(2.0**36, True), (2.0**28, True), (2.0**20, True)]
    assert expected[-1][1] is False
    assert lines_of(again / "cut") == lines_of(two / "cut") == expected[2:]
    whole = captured(four / "whole", "final", 4)
    for one, other in zip(whole, captured(again / "same", "final", 4), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    values = {name: tensor for rank in whole for name, tensor in rank.items()}
    for rank in captured(two / "fewer", "final", 2):
        for name, tensor in rank.items():
            assert (tensor - values[name]).norm() <= TOLERANCE["fp16-autocast"] * values[name].norm(), name
    saved = [find_checkpoint(each).checkpoint.loss_scale for each in (four / "whole", again / "cut")]
    assert saved[0] is not None and saved[0] == saved[1]
