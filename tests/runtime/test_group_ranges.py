"""Who keeps and who steps what several replica groups share out, and what they hand each other, by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.examples import examples
from spindle_cli.files.sharding import Sharding
from spindle_cli.runtime.communication.collectives import Members
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.communication.replica_groups import between_replica_groups
from spindle_cli.runtime.communication.replica_groups.between_replica_groups import BetweenReplicaGroups
from spindle_cli.runtime.communication.replica_groups.group_ranges import GroupRange, ReplicaGroups
from spindle_cli.runtime.communication.replica_groups.replica_group_bucket import ReplicaGroupBucket
from spindle_cli.runtime.update.owned_ranges import FlatLayout

TWO_AND_THREE = ReplicaGroups(((0, 3), (1, 2, 4)), ((), ()))


def test_what_the_same_ranks_keep_is_stepped_in_equal_parts_by_one_of_each_replica_group() -> None:
    """100 numbers of 4 bytes, in multiples of 16: in a replica group of two [0, 64) and the rest, in one
    of three [0, 48), [48, 96) and the rest.
    """
    assert TWO_AND_THREE.ranges({"a": 70, "b": 20}, 4) == (
        GroupRange(0, 16, (0, 1), 0),
        GroupRange(16, 48, (0, 1), 1),
        GroupRange(48, 64, (0, 2), 2),
        GroupRange(64, 80, (3, 2), 3),
        GroupRange(80, 96, (3, 2), 2),
        GroupRange(96, 100, (3, 4), 4),
    )


def test_equal_replica_groups_step_halves_of_equal_ranges() -> None:
    replica_groups = ReplicaGroups(((0, 1), (2, 3)), ((), ()))
    assert replica_groups.ranges({"a": 128}, 4) == (
        GroupRange(0, 32, (0, 2), 0),
        GroupRange(32, 64, (0, 2), 2),
        GroupRange(64, 96, (1, 3), 1),
        GroupRange(96, 128, (1, 3), 3),
    )


def test_weights_are_of_each_replica_group() -> None:
    """Of 4 x 16 numbers the first replica group's have 16 and 48, the second's half each."""
    replica_groups = ReplicaGroups(((0, 1), (2, 3)), ((1, 3), ()))
    found = replica_groups.ranges({"a": 64}, 4)
    assert [(group_range.first, group_range.last, group_range.keepers) for group_range in found] == [
        (0, 16, (0, 2)),
        (16, 32, (1, 2)),
        (32, 48, (1, 3)),
        (48, 64, (1, 3)),
    ]


@examples(60)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    counts=st.lists(st.integers(2, 5), min_size=2, max_size=3),
    itemsize=st.sampled_from([2, 4, 8]),
)
def test_every_number_is_stepped_once_by_one_that_keeps_it(
    sizes: list[int], counts: list[int], itemsize: int
) -> None:
    named = {str(number): size for number, size in enumerate(sizes)}
    members, first = [], 0
    for count in counts:
        members.append(tuple(range(first, first + count)))
        first += count
    ranges = ReplicaGroups(tuple(members), ((),) * len(counts)).ranges(named, itemsize)
    ends = [0, *(group_range.last for group_range in ranges)]
    assert [group_range.first for group_range in ranges] == ends[:-1]
    assert ends[-1] == max(last for _, last in FlatLayout.of(named, itemsize, 2).spans.values())
    for group_range in ranges:
        assert group_range.owner in group_range.keepers and group_range.first < group_range.last
        for replica_group, keeper in zip(members, group_range.keepers, strict=True):
            layout = FlatLayout.of(named, itemsize, len(replica_group))
            low, high = layout.range_of(replica_group.index(keeper))
            assert low <= group_range.first and group_range.last <= high


@dataclass
class Exchange:
    """What all ranks have started; `deliver` lets everything arrive."""

    posted: list[tuple[Tensor, Tensor, list[int], list[int]]] = field(default_factory=list)

    def start(self, out: Tensor, given: Tensor, taken: list[int], sent: list[int], **_: Any) -> Exchange:
        assert sum(taken) == out.numel() and sum(sent) == given.numel()
        self.posted.append((out, given, taken, sent))
        return self

    def deliver(self) -> None:
        for rank, (out, _, taken, _) in enumerate(self.posted):
            parts = [given.split(sent)[rank] for _, given, _, sent in self.posted]
            assert [part.numel() for part in parts] == taken
            out.copy_(torch.cat(parts))
        self.posted.clear()


@contextmanager
def exchanging() -> Iterator[Exchange]:
    exchange = Exchange()
    with (
        mock.patch.object(between_replica_groups.dist, "all_to_all_single", exchange.start),
        mock.patch.object(between_replica_groups, "wait_for", lambda _: None),
    ):
        yield exchange


Draw = Callable[[int, int], Tensor]  # of a rank and how many numbers


def kept_by_all(
    replica_groups: ReplicaGroups, size: int, draw: Draw
) -> tuple[list[BetweenReplicaGroups], list[Tensor], list[int]]:
    """Of every rank its part, what it keeps, and where that begins."""
    count = sum(map(len, replica_groups.members))
    ranges = replica_groups.ranges({"a": size}, draw(0, 1).itemsize)
    parts = [BetweenReplicaGroups.of(ranges, rank, count, None) for rank in range(count)]
    values, begins = [], []
    for rank in range(count):
        own = [group_range for group_range in ranges if rank in group_range.keepers]
        begins.append(own[0].first)
        values.append(draw(rank, own[-1].last - own[0].first))
    return parts, values, begins


@pytest.mark.parametrize(
    "replica_groups",
    [
        TWO_AND_THREE,
        ReplicaGroups(((0, 1), (2, 3), (4, 5)), ((), (), ())),
        ReplicaGroups(((0, 3), (1, 2)), ((), ())),
        ReplicaGroups(((0, 3), (1, 2)), ((1, 3), (1, 3))),
    ],
    ids=["two", "three", "alike", "weighted"],
)
def test_who_steps_a_piece_has_the_sum_of_all_that_keep_it_and_hands_it_on(
    replica_groups: ReplicaGroups,
) -> None:
    size = 200
    drawn = torch.Generator().manual_seed(1)
    whole = [torch.randn(size, generator=drawn, dtype=torch.float64) for _ in replica_groups.members]
    replica_group_of = {
        rank: number for number, replica_group in enumerate(replica_groups.members) for rank in replica_group
    }
    parts, values, begins = kept_by_all(
        replica_groups, size, lambda _, length: torch.zeros(length, dtype=torch.float64)
    )
    for rank, own in enumerate(values):
        own.copy_(whole[replica_group_of[rank]][begins[rank] : begins[rank] + own.numel()])
    wanted = sum(whole[1:], whole[0])
    with exchanging() as exchange:
        under_way = [part.start_sum(own) for part, own in zip(parts, values, strict=True)]
        exchange.deliver()
        for part, each, own in zip(parts, under_way, values, strict=True):
            part.finish_sum(each, own)
        _check_stepped(replica_groups, size, values, begins, wanted)
        under_way = [part.start_handing_on(own) for part, own in zip(parts, values, strict=True)]
        exchange.deliver()
        for part, each, own in zip(parts, under_way, values, strict=True):
            part.finish_handing_on(each, own)
    for begin, own in zip(begins, values, strict=True):
        torch.testing.assert_close(own, wanted[begin : begin + own.numel()], rtol=0, atol=1e-14)


def _check_stepped(
    replica_groups: ReplicaGroups, size: int, values: Sequence[Tensor], begins: Sequence[int], wanted: Tensor
) -> None:
    for group_range in replica_groups.ranges({"a": size}, 8):
        begin = begins[group_range.owner]
        own = values[group_range.owner][group_range.first - begin : group_range.last - begin]
        torch.testing.assert_close(own, wanted[group_range.first : group_range.last], rtol=0, atol=1e-14)


def test_sums_of_short_numbers_are_rounded_once() -> None:
    """1 + 1/256 + 1/256 is no number of bfloat16; rounded after each addition it is 1."""
    replica_groups = ReplicaGroups(((0, 1), (2, 3), (4, 5)), ((), (), ()))

    def draw(rank: int, length: int) -> Tensor:
        return torch.full((length,), 1.0 if rank < 2 else 2.0**-8, dtype=torch.bfloat16)

    parts, values, begins = kept_by_all(replica_groups, 192, draw)
    with exchanging() as exchange:
        under_way = [part.start_sum(own) for part, own in zip(parts, values, strict=True)]
        exchange.deliver()
        for part, each, own in zip(parts, under_way, values, strict=True):
            part.finish_sum(each, own)
    (first, *_) = [
        group_range for group_range in replica_groups.ranges({"a": 192}, 2) if group_range.owner == 0
    ]
    assert begins[0] == 0 and set(values[0][: first.last].tolist()) == {1 + 2.0**-7}


def test_a_rank_takes_buffers_for_what_it_sends_and_what_it_gets() -> None:
    """Of [48, 96) one steps [48, 64) and [80, 96), in buffers both ways, and [64, 80) goes and comes as it
    lies there; in three equal replica groups each has 64, of 192 in all, sends two thirds and gets as much.
    """
    found = BetweenReplicaGroups.of(TWO_AND_THREE.ranges({"a": 100}, 4), 2, 5, None)
    assert (found.sum_elements, found.handed_on_elements) == (32, 32)
    replica_groups = ReplicaGroups(((0, 1), (2, 3), (4, 5)), ((), (), ()))
    found = BetweenReplicaGroups.of(replica_groups.ranges({"a": 192}, 4), 3, 6, None)
    assert (found.sum_elements, found.handed_on_elements) == (64 + 64, 64 + 64)


def test_what_is_one_part_goes_and_comes_in_place() -> None:
    """Of [32, 128) the last of one replica group steps [32, 80), the other's the rest. It sends the gradients
    of that as they lie there, and takes those that it steps into a buffer, to add them; what it hands on, and
    what it gets, is where it belongs.
    """
    replica_groups = ReplicaGroups(((0, 3), (1, 2)), ((1, 3), (1, 3)))
    between = BetweenReplicaGroups.of(replica_groups.ranges({"a": 128}, 4), 3, 4, None)
    assert (between.sum_elements, between.handed_on_elements) == (48, 0)
    values = torch.zeros(96)

    def begins_at(part: Tensor) -> int | None:
        is_there = part.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        return part.storage_offset() if is_there else None

    with exchanging():
        summed, handed_on = between.start_sum(values), between.start_handing_on(values)
    assert (begins_at(summed.sent), begins_at(summed.received)) == (48, None)
    assert (begins_at(handed_on.sent), begins_at(handed_on.received)) == (0, 48)
    assert (handed_on.sent.numel(), handed_on.received.numel()) == (48, 48)


def test_what_is_stepped_outside_of_a_step_is_handed_on_to_the_other_replica_groups() -> None:
    """As averages are that change places with the parameters."""
    replica_groups = ReplicaGroups(((0, 1), (2, 3)), ((), ()))
    parameters = {"a": nn.Parameter(torch.zeros(64))}
    bucket = ReplicaGroupBucket(
        parameters, Members(2, 0, None), Sharding.PARAMETERS, Members(4, 0, None), None, replica_groups
    )
    pool = mock.Mock(spec=GradientPool)
    pool._buckets = {3: (bucket,)}
    told: list[str] = []
    with (
        mock.patch.object(bucket, "start_gather", lambda: told.append("start")),
        mock.patch.object(bucket, "finish_gather", lambda: told.append("finish")),
    ):
        GradientPool.hand_on_parameters(pool)
    assert told == ["start", "finish"]
    assert [owned.part for owned in bucket.owned_ranges] == [(0, 16)]
    assert [owned.part for owned in bucket.own_ranges] == [(0, 16), (16, 32)]
