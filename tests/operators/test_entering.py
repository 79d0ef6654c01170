"""Contexts that are made whenever they are entered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from spindle_cli.operators.whole import EnteredAnew


def test_each_entrance_has_a_context_of_its_own_and_the_inner_one_ends_first() -> None:
    events: list[str] = []

    @contextmanager
    def noted() -> Iterator[None]:
        own = len([event for event in events if event.startswith("begin")])
        events.append(f"begin {own}")
        try:
            yield
        finally:
            events.append(f"end {own}")

    anew = EnteredAnew(noted)
    with anew:
        with anew:
            pass
        with pytest.raises(ValueError, match="inside"), anew:
            raise ValueError("inside")
    assert events == ["begin 0", "begin 1", "end 1", "begin 2", "end 2", "end 0"]
