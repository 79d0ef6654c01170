"""Predictions of the paper's workloads stay near the published times of its baseline."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


@pytest.fixture(scope="module")
def calibrate() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    try:
        return runpy.run_path(str(SCRIPTS / "calibrate.py"))
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize(("workload", "num_devices"), [("clip-4", 8)])  # the others: scripts/calibrate.py
def test_sequential_takes_about_as_long_as_was_published(
    calibrate: dict[str, Any], workload: str, num_devices: int
) -> None:
    (cell,) = calibrate["cells_of"](workload, [num_devices])
    assert abs(cell.ratio - 1) <= calibrate["TOLERANCE"]
    assert max(cell.plan.predicted.peak_memory_bytes) <= 80 * 2**30


def test_the_page_has_every_published_cell_and_none_is_marked_as_off(calibrate: dict[str, Any]) -> None:
    text = calibrate["PAGE"].read_text(encoding="utf-8")
    table = text.split(calibrate["BEGIN"])[1].split(calibrate["END"])[0]
    for workload, cells in calibrate["PUBLISHED_MS"].items():
        for num_devices, published_ms in cells.items():
            assert f"| {workload} | {num_devices} | {published_ms} |" in table
    assert "(!)" not in table
