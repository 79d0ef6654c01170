"""Training in bfloat16, with and without masters, is that of plain PyTorch to bfloat16's tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.toy_plan import write_toy
from spindle_cli.verify.run import VerifyOptions, verify_plan
from spindle_cli.verify.types import TOLERANCE

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ready_pythons")]


@pytest.mark.parametrize("precision", ["bf16-autocast", "bf16"])
def test_a_plan_trains_in_bfloat16_what_plain_pytorch_does(precision: str, tmp_path: Path) -> None:
    plan = write_toy(tmp_path, train={"precision": precision, "clip_norm": 1.0, "accumulate": 2})
    report = verify_plan(plan, None, VerifyOptions(steps=2), lambda line: None)
    assert report.same, report
    assert report.dtype == precision
    differences = {check.what: check.largest.relative for check in report.checks if check.largest is not None}
    assert differences["initial parameters"] == 0
    # It did compute in bfloat16: float32 would differ by a ten-thousandth of this.
    assert 1e-4 < (differences["gradients of step 1"] or 0.0) < TOLERANCE["bf16"]


def test_a_dtype_that_is_asked_for_goes_before_the_precision(tmp_path: Path) -> None:
    plan = write_toy(tmp_path, train={"precision": "bf16"})
    report = verify_plan(plan, None, VerifyOptions(steps=1, dtype="float64"), lambda line: None)
    assert report.same, report
    assert report.dtype == "float64"
