"""The page's table is what the tests of the faults check."""

from __future__ import annotations

from fault_scenarios import ALL
from fault_table import PAGE, page_with, table


def test_the_page_has_the_table() -> None:
    assert page_with(table()) == PAGE.read_text(encoding="utf-8"), "run `make reliability`"


def test_every_row_is_a_fault_of_its_own() -> None:
    faults = [row.fault for scenario in ALL for row in scenario.rows]
    assert len(faults) == len(set(faults))
    assert len({scenario.name for scenario in ALL}) == len(ALL)
