"""Where rounding may be why two runs differ, it is measured, or what would decide it is said."""

from __future__ import annotations

import pytest
from rich.console import Console

from spindle_cli.verify.compare import rounding_may_explain
from spindle_cli.verify.show import render_report
from spindle_cli.verify.types import Check, Difference, VerifyReport, What


def test_a_buffer_alone_is_a_reason_to_measure_rounding_in_float64_only() -> None:
    off = Difference(name="norm.running_mean", where="rank 0", relative=2.5e-9)
    stale = off.model_copy(update={"relative": 0.1})
    for failure, dtype, may in ((off, "float64", True), (stale, "float64", False), (off, "float32", False)):
        check = Check(what="buffers", compared=1, tolerance=1e-9, largest=failure, failures=(failure,))
        assert rounding_may_explain(report_of(check, dtype)) == may


@pytest.mark.parametrize(
    ("what", "dtype", "told"),
    [
        ("gradients of step 1", "float32", "Where much cancels"),
        ("final parameters", "float32", "The first gradients agree"),
        ("initial parameters", "float32", None),
        ("gradients of step 1", "float64", None),
    ],
)
def test_a_difference_that_float64_may_decide_says_so(what: What, dtype: str, told: str | None) -> None:
    off = Difference(name="w", where="rank 0", relative=8e-5)
    check = Check(what=what, compared=1, tolerance=1e-5, largest=off, failures=(off,))
    console = Console(record=True, width=200)
    console.print(render_report(report_of(check, dtype)))
    said = console.export_text()
    assert ("--dtype float64" in said) == (told is not None)
    assert told is None or told in said


def report_of(check: Check, dtype: str) -> VerifyReport:
    return VerifyReport.model_validate(
        {
            "same": False,
            "workload": "w",
            "strategy": "spindle",
            "workers": 1,
            "steps": 1,
            "dtype": dtype,
            "checks": [check.model_dump()],
            "noise_floor": 1e-13,
            "noise": [],
            "unused": [],
        }
    )
