"""A measured link, as the cost formulas read it back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spindle_cli.costs.links import transfer_s
from spindle_cli.profile.machine.link_speed import CURVE_ELEMENTS, as_link, as_measured


def test_message_times_come_back_from_the_link() -> None:
    seconds = {elements: 1e-4 + elements * 4 / 2e9 for elements in CURVE_ELEMENTS}
    measured = as_measured(1e-4, seconds)
    link = as_link(measured)
    assert measured.latency_s == 1e-4
    for elements, message_s in seconds.items():
        # Below a tenth of the latency the bytes' own time is not known better than that.
        assert transfer_s(elements * 4, link) == pytest.approx(message_s, rel=0.12)


@given(st.lists(st.floats(1e-6, 1e-1), min_size=len(CURVE_ELEMENTS) + 1, max_size=len(CURVE_ELEMENTS) + 1))
def test_larger_messages_are_never_faster_whatever_was_seen(seen: list[float]) -> None:
    link = as_link(as_measured(seen[0], dict(zip(CURVE_ELEMENTS, seen[1:], strict=True))))
    times = [transfer_s(elements * 4, link) for elements in CURVE_ELEMENTS]
    assert all(later >= earlier * 0.89 for earlier, later in pairwise(times))
