"""Training in bfloat16, with and without masters, is that of plain PyTorch to bfloat16's tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.toy_plan import write_toy
from spindle_cli.files.run_files import read_metrics
from spindle_cli.verify.run import verify_plan
from spindle_cli.verify.types import TOLERANCE, VerifyOptions

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ready_pythons")]


# One group is stepped whole, one in ranges; both have averages.
UPDATED: dict[str, object] = {
    "groups": [
        {"name": "heads", "parameters": ["*.head.*"], "kinds": ["matrices"], "optimizer": "Muon"},
        "rest",
    ],
    "ema": {"decay": 0.5},
}


@pytest.mark.parametrize("precision", ["bf16-autocast", "bf16"])
def test_a_plan_trains_in_bfloat16_what_plain_pytorch_does(precision: str, tmp_path: Path) -> None:
    train = {"precision": precision, "clip_norm": 1.0, "accumulate": 2, **UPDATED}
    plan = write_toy(tmp_path, train=train)
    report = verify_plan(plan, None, VerifyOptions(steps=2), lambda line: None)
    assert report.same, report
    assert report.dtype == precision
    differences = {check.what: check.largest.relative for check in report.checks if check.largest is not None}
    assert differences["initial parameters"] == 0
    # It did compute in bfloat16: float32 would differ by a ten-thousandth of this.
    assert 1e-4 < (differences["gradients of step 1"] or 0.0) < TOLERANCE["bf16"]


def test_in_float64_what_rounding_decides_is_named_and_all_else_is_exact(tmp_path: Path) -> None:
    """The dtype that is asked for goes before the precision. A third of `in_proj_bias` are key biases."""
    plan = write_toy(tmp_path, train={"precision": "bf16", "groups": "no_decay", "ema": {"decay": 0.5}})
    said: list[str] = []
    report = verify_plan(plan, None, VerifyOptions(steps=2, dtype="float64"), said.append)
    assert report.same, report
    assert report.dtype == "float64"
    assert report.rounding is None  # what rounding alone does was asked for, and not needed as an excuse
    assert said[-1].startswith("training 2 steps in one plain process with rounding noise")
    sizes = {
        check.what: check.largest.relative or 0.0 for check in report.checks if check.largest is not None
    }
    assert max(sizes["final parameters"], sizes["average of the weights"]) < 1e-14
    assert 0 < sizes["values near zero gradients"] < 0.1
    left_out = {entry.name: (entry.left_out, entry.elements) for entry in report.noise}
    assert left_out == {
        **{f"large.blocks.{block}.key.bias": (16, 16) for block in range(2)},
        **{f"large.blocks.{block}.attention.in_proj_bias": (16, 48) for block in range(2)},
    }


def test_neither_run_of_a_verification_rounds_convolutions_to_tf32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN may by itself, and what its algorithms then give depends on how many samples there are."""
    plan = write_toy(tmp_path, module="tf32_workload.py")
    options = VerifyOptions(steps=1, run_dir=tmp_path / "verify")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # torch's default; a trainer here unsets it
    verify_plan(plan, None, options, lambda line: None)
    for run in ("plain", "plan"):
        (step,) = read_metrics(tmp_path / "verify" / run)
        assert step.task_losses == {"large": 0.0, "small": 0.0}, run
