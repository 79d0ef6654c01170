"""Where gathered parameters lie: apart where they are there at once, else in the same memory."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spindle_cli.account.holdings import GatherUnit, Places, Span, places_of


def one_after_the_other(*sizes: float) -> list[GatherUnit]:
    """A unit for each op of one slice."""
    return [GatherUnit(size, (Span(0, op, op),)) for op, size in enumerate(sizes, 3)]


@pytest.mark.parametrize(
    ("sizes", "offsets", "num_bytes"),
    [
        ((), (), 0.0),
        ((5.0,), (0.0,), 5.0),
        ((1.0, 1.0), (0.0, 1.0), 2.0),
        ((1.0, 1.0, 1.0, 1.0), (0.0, 1.0, 0.0, 1.0), 2.0),
        # a large one at each end, with an even and an odd number between: as much as two that follow
        ((9.0, 2.0, 2.0, 9.0), (0.0, 9.0, 0.0, 2.0), 11.0),
        ((46.0, 43.0, 43.0, 43.0, 43.0, 45.0), (0.0, 46.0, 0.0, 43.0, 0.0, 43.0), 89.0),
        ((9.0, 2.0, 2.0, 2.0, 9.0), (0.0, 9.0, 0.0, 9.0, 0.0), 11.0),
        ((1.0, 4.0, 1.0), (4.0, 0.0, 4.0), 5.0),
    ],
)
def test_ops_one_after_the_other_need_room_for_two(
    sizes: tuple[float, ...], offsets: tuple[float, ...], num_bytes: float
) -> None:
    assert places_of(one_after_the_other(*sizes)) == Places(offsets, num_bytes)


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (Span(0, 1, 1), Span(0, 2, 2), True),  # fetched while the first runs
        (Span(0, 1, 1), Span(0, 3, 3), False),
        (Span(0, 1, 2), Span(0, 3, 3), True),
        (Span(0, 1, 9), Span(0, 4, 5), True),
        (Span(0, 1, 1), Span(1, 2, 2), False),  # another slice
        (Span(0, 1, 1), Span(1, 1, 1), False),
    ],
)
def test_what_is_there_at_once_lies_apart(one: Span, other: Span, apart: bool) -> None:
    assert places_of([GatherUnit(4.0, (one,)), GatherUnit(2.0, (other,))]).num_bytes == (
        6.0 if apart else 4.0
    )
    assert places_of([GatherUnit(2.0, (other,)), GatherUnit(4.0, (one,))]).num_bytes == (
        6.0 if apart else 4.0
    )


def test_one_slice_that_uses_both_at_once_is_enough() -> None:
    units = [GatherUnit(1.0, (Span(0, 0, 0), Span(1, 4, 4))), GatherUnit(1.0, (Span(0, 9, 9), Span(1, 5, 5)))]
    assert places_of(units).num_bytes == 2.0


SPANS = st.builds(
    lambda piece, first, length: Span(piece, first, first + length),
    st.integers(0, 2),
    st.integers(0, 6),
    st.integers(0, 3),
)
LOTS = st.lists(
    st.builds(
        lambda size, spans: GatherUnit(
            float(size), tuple(sorted({span.slice_index: span for span in spans}.values()))
        ),
        st.integers(1, 9),
        st.lists(SPANS, min_size=1, max_size=3),
    ),
    max_size=8,
)


def there(unit: GatherUnit, piece: int, op: int, *, backward: bool) -> bool:
    """Whether it is there while an op runs: from the op before it in the pass to the last that uses it."""
    early, late = (0, 1) if backward else (1, 0)
    return any(
        span.slice_index == piece and span.first - early <= op <= span.last + late and 0 <= op <= 9
        for span in unit.spans
    )


@given(LOTS)
def test_no_two_that_are_there_while_an_op_runs_share_a_byte(units: list[GatherUnit]) -> None:
    places = places_of(units)
    for (one, begin), (other, start) in combinations(zip(units, places.offsets, strict=True), 2):
        at_once = any(
            there(one, piece, op, backward=backward) and there(other, piece, op, backward=backward)
            for piece in range(3)
            for op in range(-1, 12)
            for backward in (False, True)
        )
        if at_once:
            assert begin + one.num_bytes <= start or start + other.num_bytes <= begin
    ends = [begin + unit.num_bytes for unit, begin in zip(units, places.offsets, strict=True)]
    assert places.num_bytes == max(ends, default=0.0)
    assert places.num_bytes <= sum(unit.num_bytes for unit in units)
