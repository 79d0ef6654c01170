"""What crosses between the devices of slices, for memory: by hand."""

from __future__ import annotations

from helpers.plans import metaop_of, slice_of
from spindle_cli.account.activations import Crossings
from spindle_cli.profile.types import MetaOpProfile

MIB = 2**20


def of(name: str, *inputs: str) -> MetaOpProfile:
    """A MetaOp that hands on 8 MiB."""
    return metaop_of(name, 1, {1: 1.0, 2: 1.0}, inputs=inputs).model_copy(update={"output_bytes": 8 * MIB})


def test_gradients_of_several_consumers_take_a_share_for_their_sum() -> None:
    """`made` by devices 0 and 1, half each; taken there, and by device 2 alone, which sends both halves back.
    The sum of the two gradients takes half of 8 MiB more.
    """
    made, same, other = of("a/made"), of("a/same", "a/made"), of("a/other", "a/made")
    slices = [
        slice_of(made, (0, 1), (0, 1), 0.0),
        slice_of(same, (0, 1), (0, 1), 1.0),
        slice_of(other, (0, 1), (2,), 1.0),
    ]
    crossings = Crossings(slices, {each.name: each for each in (made, same, other)})
    assert crossings.received_by(1) is None
    assert crossings.received_by(2) == [8 * MIB]
    assert crossings.returned_to(0) == [4 * MIB + 4 * MIB] * 2
    assert [crossings.is_handed_on(index) for index in range(3)] == [True, False, False]


def test_two_consumers_on_the_same_devices_send_nothing_and_their_sum_takes_a_share() -> None:
    made, one, two = of("a/made"), of("a/one", "a/made"), of("a/two", "a/made")
    slices = [slice_of(each, (0, 1), (0, 1), float(at)) for at, each in enumerate((made, one, two))]
    crossings = Crossings(slices, {each.name: each for each in (made, one, two)})
    assert crossings.returned_to(0) == [4 * MIB] * 2
    crossings = Crossings(slices[:2], {each.name: each for each in (made, one)})
    assert crossings.returned_to(0) is None


def test_micro_batches_hand_on_their_part() -> None:
    """The same as for the whole batch, in two micro-batches: half of the bytes each."""
    made, same, other = of("a/made"), of("a/same", "a/made"), of("a/other", "a/made")
    slices = [
        slice_of(each, (0, 1), devices, 0.0).model_copy(update={"micro_batch": number, "micro_batches": 2})
        for number in (0, 1)
        for each, devices in ((made, (0, 1)), (same, (0, 1)), (other, (2,)))
    ]
    crossings = Crossings(slices, {each.name: each for each in (made, same, other)})
    for first in (0, 3):
        assert crossings.received_by(first + 1) is None
        assert crossings.received_by(first + 2) == [4 * MIB]
        assert crossings.returned_to(first) == [2 * MIB + 2 * MIB] * 2
