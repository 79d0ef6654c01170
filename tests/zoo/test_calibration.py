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


def table_of(calibrate: dict[str, Any]) -> str:
    text = calibrate["PAGE"].read_text(encoding="utf-8")
    return str(text.split(calibrate["BEGIN"])[1].split(calibrate["END"])[0])


@pytest.mark.long
@pytest.mark.parametrize(("workload", "num_devices"), [("clip-4", 8)])  # the others: scripts/calibrate.py
def test_the_page_says_what_is_predicted_today(
    calibrate: dict[str, Any], workload: str, num_devices: int
) -> None:
    """To a millisecond, a GiB and a hundredth of the published time, which it is near."""
    (cell,) = calibrate["cells_of"](workload, [num_devices])
    assert cell.row in table_of(calibrate).splitlines()
    assert abs(cell.ratio - 1) <= calibrate["TOLERANCE"]


def test_the_page_has_every_published_cell_and_none_is_marked_as_off(calibrate: dict[str, Any]) -> None:
    table = table_of(calibrate)
    for workload, cells in calibrate["PUBLISHED_MS"].items():
        for num_devices, published_ms in cells.items():
            assert f"| {workload} | {num_devices} | {published_ms} |" in table
    assert "(!)" not in table
