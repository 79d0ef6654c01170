"""Scatters and gathers of unequal ranges, padded and grouped, and of sums of everything: three ranks in turn
in one process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.done_work import Done
from spindle_cli.runtime.communication.collectives import (
    Members,
    scatter_buffer_bytes,
    start_gather,
    start_scatter,
)
from spindle_cli.runtime.update.owned_ranges import FlatLayout

CUTS = (0, 2, 7, 7)  # of 7 elements 2, 5 and none


@dataclass
class Net:
    """What gloo would do between ranks that call one after another; nothing is read before all have."""

    exchanged: list[tuple[Tensor, Tensor, list[int] | None]] = field(default_factory=list)
    sent: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by source and destination
    received: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    summed: list[Tensor] = field(default_factory=list)
    rank: int = 0

    def all_to_all_single(
        self, out: Tensor, given: Tensor, into: object = None, sizes: list[int] | None = None, **_: object
    ) -> Done:
        self.exchanged.append((out, given, sizes))
        if len(self.exchanged) == 3:
            parts = [given.split(sizes or [given.numel() // 3] * 3) for _, given, sizes in self.exchanged]
            for rank, (out, _, _) in enumerate(self.exchanged):
                out.view(-1).copy_(torch.cat([own[rank] for own in parts]))
        return Done()

    def isend(self, sent: Tensor, *, group_dst: int, tag: int, **_: object) -> Done:
        return self._meet(self.sent, (self.rank, group_dst), sent, tag)

    def irecv(self, received: Tensor, *, group_src: int, tag: int, **_: object) -> Done:
        return self._meet(self.received, (group_src, self.rank), received, tag)

    def _meet(
        self, ends: dict[tuple[int, int], Tensor], pair: tuple[int, int], own: Tensor, tag: int
    ) -> Done:
        """Hand a message over once both its ends are there."""
        assert tag > 0 and pair not in ends, "messages of a gather are told from others by their tag"
        ends[pair] = own
        if pair in self.sent and pair in self.received:
            self.received[pair].copy_(self.sent[pair])
        return Done()

    def all_reduce(self, flat: Tensor, **_: object) -> Done:
        self.summed.append(flat)
        if len(self.summed) == 3:
            total = torch.stack(self.summed).sum(0)
            for own in self.summed:
                own.copy_(total)
        return Done()


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    made = Net()
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(dist, "all_to_all_single", made.all_to_all_single)
    monkeypatch.setattr(dist, "isend", made.isend)
    monkeypatch.setattr(dist, "irecv", made.irecv)
    monkeypatch.setattr(dist, "all_reduce", made.all_reduce)
    return made


def members(rank: int, *, pads: bool) -> Members:
    return Members(3, rank, None, (2, 5, 1), CUTS, pads_sum=pads, pads_gather=pads)


@pytest.mark.parametrize("pads", [False, True])
def test_each_rank_gets_the_sum_of_its_range(net: Net, *, pads: bool) -> None:
    flats = [torch.arange(7.0) * 10**rank for rank in range(3)]
    scatters = [start_scatter(flat, members(rank, pads=pads)) for rank, flat in enumerate(flats)]
    for rank, scatter in enumerate(scatters):
        assert scatter.is_done()
        scatter.finish()
        assert members(rank, pads=pads).range_in(flats[rank]).tolist() == [
            111.0 * element for element in range(*CUTS[rank : rank + 2])
        ]


@pytest.mark.parametrize("pads", [False, True])
def test_each_rank_gets_all_ranges(net: Net, *, pads: bool) -> None:
    flats = [torch.full((7,), float(rank)) for rank in range(3)]
    works = []
    for net.rank, flat in enumerate(flats):
        works.append(start_gather(flat, members(net.rank, pads=pads)))
    for work, flat in zip(works, flats, strict=True):
        work.wait()
        assert work.is_completed()
        work.wait()  # a second time brings nothing new, and ends
        assert flat.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    senders = {source for source, _ in net.sent}
    assert senders == ({0, 1, 2} if pads else {0, 1}), "nobody sends nothing"
    assert net.sent.keys() == net.received.keys()


def test_where_everything_is_summed_each_rank_has_its_range_and_takes_no_buffer(net: Net) -> None:
    flats = [torch.arange(6.0) * 10**rank for rank in range(3)]
    whole = [Members(3, rank, None, sums_whole=True) for rank in range(3)]
    assert [scatter_buffer_bytes(flat, own) for flat, own in zip(flats, whole, strict=True)] == [0] * 3
    for scatter in [start_scatter(flat, own) for flat, own in zip(flats, whole, strict=True)]:
        assert scatter.is_done()
        scatter.finish()
    found = [own.range_in(flat).tolist() for flat, own in zip(flats, whole, strict=True)]
    assert found == [[0.0, 111.0], [222.0, 333.0], [444.0, 555.0]]
    assert not net.exchanged and not net.sent


def test_a_gather_by_a_sum_brings_each_rank_the_others_ranges_as_they_are(net: Net) -> None:
    """What a rank has in place of others' ranges is what it had before their update: it must not count."""
    flats = [torch.full((6,), 100.0) for _ in range(3)]
    whole = [Members(3, rank, None, gathers_whole=True) for rank in range(3)]
    for own, flat in zip(whole, flats, strict=True):
        own.range_in(flat).copy_(torch.tensor([0.1, float("inf")]) * (own.position + 1))
    for work in [start_gather(flat, own) for flat, own in zip(flats, whole, strict=True)]:
        work.wait()
    expected = torch.tensor([0.1, float("inf")]) * torch.tensor([[1], [2], [3]])
    assert all(torch.equal(flat, expected.view(-1)) for flat in flats)
    assert not net.exchanged and not net.sent


def test_a_scatter_takes_what_its_rank_receives(net: Net) -> None:
    """Grouped 3 times its own range, padded a copy of 3 x 5 and what is received of it, in float32."""
    flat = torch.zeros(7)
    assert [scatter_buffer_bytes(flat, members(rank, pads=False)) for rank in range(3)] == [24, 60, 0]
    assert [scatter_buffer_bytes(flat, members(rank, pads=True)) for rank in range(3)] == [120] * 3


def test_ranges_are_in_proportion_to_weights() -> None:
    """97 and 3 float64 elements, each from a multiple of 8 on, are 14 steps of 8, of which 3.5 and 10.5 lie
    before the cuts.
    """
    layout = FlatLayout.of({"a": 97, "b": 3}, 8, 3, (1, 2, 1))
    assert layout.spans == {"a": (0, 97), "b": (104, 107)}
    assert layout.cuts == (0, 24, 80, 112)
    assert layout.size == 112
    assert [layout.range_of(position) for position in range(3)] == list(pairwise(layout.cuts))
    assert list(layout.owned(2)) == [("a", 80, 97), ("b", 0, 3)]
    covered = [list(layout.owned(position)) for position in range(3)]
    assert sum(last - first for own in covered for _, first, last in own) == 100
    assert FlatLayout.of({"a": 3}, 8, 2, (1, 9)).cuts == (0, 0, 8)
