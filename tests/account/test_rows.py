"""Who holds which rows, and routes between layouts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spindle_cli.account.activations import Chunk, Layout, crossing, route


def test_each_share_gets_its_rows_and_its_consecutive_devices() -> None:
    layout = Layout(devices=(3, 1, 0, 2), dp=2, tp=2, batch_size=8)
    assert layout.rows_of(3) == layout.rows_of(1) == (0, 4)
    assert layout.rows_of(0) == layout.rows_of(2) == (4, 8)
    assert layout.holders(1) == (0, 2)


def test_from_two_shares_to_three_the_middle_one_takes_from_both() -> None:
    source = Layout((0, 1), dp=2, tp=1, batch_size=6)
    destination = Layout((1, 2, 3), dp=3, tp=1, batch_size=6)
    assert route(source, destination) == (
        Chunk(destination=1, first=0, last=2, source=0),
        Chunk(destination=2, first=2, last=3, source=0),
        Chunk(destination=2, first=3, last=4, source=1),
        Chunk(destination=3, first=4, last=6, source=1),
    )


def test_a_device_that_holds_the_rows_is_its_own_source() -> None:
    source = Layout((0, 1, 2, 3), dp=1, tp=4, batch_size=4)
    destination = Layout((2, 5), dp=2, tp=1, batch_size=4)
    assert route(source, destination)[0] == Chunk(destination=2, first=0, last=2, source=2)


def test_the_holders_of_a_share_take_turns_as_sources() -> None:
    source = Layout((0, 1), dp=1, tp=2, batch_size=4)
    destination = Layout((4, 5, 6, 7), dp=4, tp=1, batch_size=4)
    assert [chunk.source for chunk in route(source, destination)] == [0, 1, 0, 1]


@st.composite
def layouts(draw: st.DrawFn, batch_size: int) -> Layout:
    dp = draw(st.sampled_from([dp for dp in range(1, 13) if batch_size % dp == 0]))
    tp = draw(st.integers(1, 4))
    if draw(st.booleans()):
        inner = draw(st.sets(st.integers(1, batch_size - 1), max_size=11)) if batch_size > 1 else ()
        offsets: tuple[int, ...] | None = (0, *sorted(inner), batch_size)
        dp = len(inner) + 1
    else:
        offsets = None
    devices = draw(st.permutations(range(60)))[: dp * tp]
    return Layout(tuple(devices), dp, tp, batch_size, offsets=offsets)


@given(st.data())
def test_route_brings_every_row_exactly_once_from_a_device_that_holds_it(data: st.DataObject) -> None:
    batch_size = data.draw(st.sampled_from([1, 4, 6, 12]))
    source, destination = data.draw(layouts(batch_size)), data.draw(layouts(batch_size))
    chunks = route(source, destination)
    assert chunks == tuple(sorted(chunks))
    for device in destination.devices:
        taken = [chunk for chunk in chunks if chunk.destination == device]
        rows = [row for chunk in taken for row in range(chunk.first, chunk.last)]
        assert rows == list(range(*destination.rows_of(device)))
        for chunk in taken:
            low, high = source.rows_of(chunk.source)
            assert low <= chunk.first < chunk.last <= high
            if (
                device in source.share_of
                and source.rows_of(device)[0] <= chunk.first < source.rows_of(device)[1]
            ):
                assert chunk.source == device
    assert {chunk.destination for chunk in chunks} == set(destination.devices)


@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_overlaps_agrees_with_looking_at_every_share(batch_size: int, dp: int, data: st.DataObject) -> None:
    offsets = None
    if dp <= batch_size and data.draw(st.booleans()):
        offsets = (0, *sorted(data.draw(st.permutations(range(1, batch_size)))[: dp - 1]), batch_size)
    layout = Layout(tuple(range(dp)), dp, 1, batch_size, offsets=offsets)
    first = data.draw(st.integers(0, batch_size - 1))
    last = data.draw(st.integers(first + 1, batch_size))
    looked = [
        (share, max(low, first), min(high, last)) for share in range(dp) for low, high in [layout.rows(share)]
    ]
    assert list(layout.overlaps(first, last)) == [item for item in looked if item[1] < item[2]]


@given(st.data())
def test_what_crosses_is_the_route_but_for_what_devices_hold_themselves(data: st.DataObject) -> None:
    """Also of equal cuts, of which some shares lie on other devices, and some may be empty."""
    batch_size = data.draw(st.sampled_from([1, 4, 6, 12]))
    source, destination = data.draw(layouts(batch_size)), data.draw(layouts(batch_size))
    if data.draw(st.booleans()):
        cuts = tuple(sorted(data.draw(st.lists(st.integers(0, batch_size), min_size=2, max_size=4))))
        offsets = (0, *cuts, batch_size)
        first = data.draw(st.permutations(range(12)))
        second = data.draw(st.sampled_from([first, [*first[:2], *reversed(first[2:])]]))
        shares = len(offsets) - 1
        source, destination = (
            Layout(tuple(devices[:shares]), shares, 1, batch_size, offsets=offsets)
            for devices in (first, second)
        )
    sent = [chunk for chunk in route(source, destination) if chunk.source != chunk.destination]
    assert sorted(crossing(source, destination)) == sent
