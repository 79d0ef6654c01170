"""How violations are said."""

from __future__ import annotations

import pytest

from spindle_cli.check.types import Violation


@pytest.mark.parametrize(("length", "is_cut"), [(400, False), (401, True), (140_000, True)])
def test_a_name_of_any_length_leaves_a_message_that_can_be_read(length: int, is_cut: bool) -> None:
    where = "a" + "x" * (length - 2) + "z"
    said = str(Violation(rule="order", where=where, devices=(), value="1", expected="2"))
    assert said.endswith("z: 1; expected 2 [order]")
    assert (" ... " in said) == is_cut
    assert len(said) < 450
