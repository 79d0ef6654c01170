"""In which parts parameters are updated, worked out by hand."""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of, slice_of
from spindle_cli.account.device_memory import memory_by_pass
from spindle_cli.account.step_end import own_bytes, part_ends, parts_by_device, update_parts
from spindle_cli.account.types import ParameterGroup

MIB = 2**20
FOUR = 4 * MIB


def group(index: int, num_bytes: int, devices: tuple[int, ...] = (0, 1), **more: object) -> ParameterGroup:
    blocks = ((f"p{index}", 0),)
    made = ParameterGroup(index, devices, blocks, num_bytes, num_bytes, (0,), (0,), (0, 1))
    return ParameterGroup(**{**made.__dict__, **more})


@pytest.mark.parametrize(
    ("sizes", "ends"),
    [
        ([0], (1,)),
        ([FOUR], (1,)),
        # Two parts of 4 MiB, and one byte less in either of them: one part.
        ([0, FOUR, FOUR], (2, 3)),
        ([0, FOUR - 1, FOUR], (3,)),
        ([0, FOUR, FOUR - 1], (3,)),
        ([0, FOUR - 1, FOUR, 1], (4,)),
        ([0, FOUR - 1, 1, FOUR], (3, 4)),
        # What is summed with nobody is a part of its own if it is large enough.
        ([FOUR, FOUR], (1, 2)),
        ([FOUR - 1, 1, FOUR], (2, 3)),
        # Neighbours are joined until they are enough; what is left over goes with the last part.
        ([MIB, 3 * MIB, MIB, 3 * MIB, 2 * MIB], (2, 5)),
        ([MIB, 3 * MIB, MIB, 3 * MIB, 4 * MIB], (2, 4, 5)),
        ([0, 64 * MIB, MIB], (3,)),
        # Of 64 MiB an eighth is 8 MiB; of 68 MiB 8.5 MiB.
        ([0, *[FOUR] * 16], (3, 5, 7, 9, 11, 13, 15, 17)),
        ([0, *[FOUR] * 17], (4, 7, 10, 13, 18)),
        ([0, *[8 * MIB] * 8], tuple(range(2, 10))),
        ([0, 8 * MIB, 8 * MIB - 1, *[8 * MIB] * 5, 8 * MIB + 1], (2, 4, 5, 6, 7, 8, 9)),
    ],
)
def test_neighbours_are_joined_until_they_are_worth_an_update(
    sizes: list[int], ends: tuple[int, ...]
) -> None:
    assert part_ends(sizes) == ends


def test_each_part_has_its_share_and_its_products() -> None:
    groups = [
        group(1, FOUR, product_s=0.5),
        group(3, MIB, product_s=0.25),
        group(4, 3 * MIB),
        group(6, 8 * MIB, product_s=2.0),
    ]
    own, joined, last = update_parts(FOUR, groups)[0], *update_parts(FOUR, groups)[2:]
    assert [part.groups for part in update_parts(FOUR, groups)] == [(), (1,), (3, 4), (6,)]
    assert (own.share, own.product_s) == (0.2, 0.0)
    assert (joined.share, joined.product_s) == (0.2, 0.25)
    assert (last.share, last.product_s) == (0.4, 2.0)
    assert last.seconds(10.0) == 6.0


def test_one_part_is_the_whole_step() -> None:
    (part,) = update_parts(0, [group(0, MIB, product_s=0.5), group(1, MIB)])
    assert (part.groups, part.share, part.seconds(3.0)) == ((0, 1), 1.0, 3.5)
    (nothing,) = update_parts(0, [])
    assert (nothing.groups, nothing.seconds(3.0)) == ((), 3.0)


def test_devices_have_parts_of_their_own_groups_alone() -> None:
    """Frozen parameters that devices share out are updated by nobody."""
    groups = [
        group(0, FOUR, (1,)),
        group(1, FOUR, (0, 1)),
        group(2, 0, (0, 1), is_trained=False),
        group(3, 2 * FOUR, (0, 2)),
        group(4, FOUR, (1,)),
        group(5, 3 * FOUR, (0, 1)),
    ]
    assert own_bytes(groups) == {1: 2 * FOUR}
    parts = parts_by_device(groups, {0: [3], 1: [None, 1], 2: []})
    assert [(part.groups, part.share) for part in parts[0]] == [((1, 3), 0.5), ((5,), 0.5)]
    assert [(part.groups, part.share) for part in parts[1]] == [((), 1 / 3), ((1,), 1 / 6), ((5,), 0.5)]
    assert [(part.groups, part.share) for part in parts[2]] == [((3,), 1.0)]


def test_an_update_by_parts_takes_its_memory_beside_sums_and_returned_gradients() -> None:
    """Two devices hand 32 MiB from one to the other, whose gradient goes back; the update takes twice the
    4 MiB that it updates, and is the fullest moment then.
    """
    first = metaop_of("a/first", 1, {1: 1.0}, param_bytes_per_op=FOUR, activation_bytes_per_op=0)
    last = metaop_of("a/last", 1, {1: 1.0}, param_bytes_per_op=FOUR, inputs=("a/first",))
    first = first.model_copy(update={"output_bytes": 32 * MIB})
    last = last.model_copy(update={"activation_bytes_per_op": 0})
    slices = [slice_of(first, (0, 1), (0,), 0.0), slice_of(last, (0, 1), (1,), 1.0)]

    def update_bytes(**training: object) -> int:
        profile = profile_of(first, last).model_copy(update={"update_bytes_per_param": 2.0, **training})
        return memory_by_pass([first, last], slices, cluster_of(2), profile)[1].update_bytes

    once, apart = update_bytes(), update_bytes(updates_by_parts=True)
    assert apart - once == pytest.approx(1.01 * 8 * MIB, rel=1e-6)
    assert update_bytes(updates_by_parts=True, update_bytes_per_param=0.0) == once
