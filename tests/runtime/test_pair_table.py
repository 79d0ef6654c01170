"""The page of what plans can say, each with each, is what the tests of the pairs train."""

from __future__ import annotations

from pair_cases import FEATURES, NOT_TOGETHER, PAIRS
from pair_table import PAGE, page


def test_the_page_is_current() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "run `make test-pairs`"


def test_every_pair_but_of_one_axis_is_tried() -> None:
    assert len(PAIRS) == len(FEATURES) * (len(FEATURES) - 1) // 2 - 4
    assert {frozenset(pair) for pair in PAIRS} > set(NOT_TOGETHER)
