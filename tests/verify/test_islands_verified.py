"""Islands that average now and then alone train what plain PyTorch makes of the same rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.island_plans import write_islands
from spindle_cli.profile.types import LocalSgd
from spindle_cli.verify.run import verify_plan
from spindle_cli.verify.types import VerifyOptions, VerifyReport

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ready_pythons")]


def verified(folder: Path, asked: LocalSgd, train: dict[str, object], steps: int) -> VerifyReport:
    plan = write_islands(folder, asked, train)
    options = VerifyOptions(steps=steps, dtype="float64", run_dir=folder / "runs")
    return verify_plan(plan, None, options, lambda line: None)


def largest(report: VerifyReport) -> dict[str, float]:
    return {check.what: check.largest.relative or 0.0 for check in report.checks if check.largest is not None}


def test_islands_by_diloco_are_exact(tmp_path: Path) -> None:
    """Two outer steps of Nesterov momentum, and a step beyond the last."""
    asked = LocalSgd(islands=2, every=2)
    report = verified(tmp_path, asked, {"optimizer": "AdamW", "lr": 1e-2, "accumulate": 2}, 5)
    assert report.same, report
    assert (report.islands, report.outer_every, report.workers) == (2, 2, 4)
    assert largest(report)["final parameters"] < 1e-13
    compared = {check.what: check.compared for check in report.checks}
    assert compared["losses"] == 5 * 3  # of both tasks and in all, each the mean over islands
    assert (tmp_path / "runs" / "plan" / "islands" / "1" / "captured").is_dir()


def test_differences_in_8_bits_are_rounded_as_in_plain_pytorch(tmp_path: Path) -> None:
    """Clipped by each island's own norm. Fewer steps than `every` end in an outer step all the same."""
    asked = LocalSgd(islands=2, every=4, bits=8, outer={"lr": 0.5, "momentum": 0.5, "nesterov": False})
    report = verified(tmp_path, asked, {"optimizer": "SGD", "lr": 0.1, "clip_norm": 0.5}, 2)
    assert report.same, report
    assert report.outer_every == 2
    assert largest(report)["final parameters"] < 1e-13
