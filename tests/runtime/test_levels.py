"""Scatters and gathers that go inside of nodes and between them: four ranks in threads, two on each node; and
where, on a GPU, the second waits for the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue
from threading import Barrier, local
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.done_work import Done
from spindle_cli.account.types import ParameterGroup, Purpose
from spindle_cli.program.types import Communicator
from spindle_cli.runtime.backends import side_stream
from spindle_cli.runtime.backends.side_stream import SideStream
from spindle_cli.runtime.communication.collectives import (
    Levels,
    Members,
    scatter_buffer_bytes,
    start_gather,
    start_scatter,
)
from spindle_cli.runtime.communication.communicators import Communicators
from spindle_cli.runtime.communication.gradients import GradientPool


class Pairs:
    """What gloo does between the two ranks of each group, each a thread that says who it is."""

    def __init__(self) -> None:
        self.thread = local()
        self._rooms: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self._doors = {name: Barrier(2) for name in ("node 0", "node 1", "place 0", "place 1")}
        self._sent: dict[tuple[str, int], Queue[Tensor]] = {
            (name, place): Queue() for name in self._doors for place in (0, 1)
        }

    def place(self, group: str) -> int:
        rank: int = self.thread.rank
        return rank % 2 if group.startswith("node") else rank // 2

    def brought(self, group: str, own: Tensor) -> list[Tensor]:
        """By both, in their order."""
        self._rooms[group][self.place(group)] = own.clone()
        self._doors[group].wait(20)
        both = [self._rooms[group][place] for place in (0, 1)]
        self._doors[group].wait(20)
        return both

    def all_to_all_single(self, out: Tensor, given: Tensor, *, group: str, **_: object) -> Done:
        parts = [each.view(-1).chunk(2)[self.place(group)] for each in self.brought(group, given)]
        out.view(-1).copy_(torch.cat(parts))
        return Done()

    def isend(self, own: Tensor, *, group: str, group_dst: int, **_: object) -> Done:
        self._sent[group, group_dst].put(own.clone())
        return Done()

    def irecv(self, other: Tensor, *, group: str, **_: object) -> Received:
        return Received(self._sent[group, self.place(group)], other)


class Received(Done):
    """What is there once it was waited for."""

    def __init__(self, sent: Queue[Tensor], other: Tensor) -> None:
        super().__init__()
        self._sent, self._other = sent, other

    def wait(self, timeout: object = None) -> bool:
        self._other.copy_(self._sent.get(timeout=20))
        return True


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Pairs:
    made = Pairs()
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(dist, "all_to_all_single", made.all_to_all_single)
    monkeypatch.setattr(dist, "isend", made.isend)
    monkeypatch.setattr(dist, "irecv", made.irecv)
    return made


def members_of(rank: int) -> Members:
    """Of four ranks, 0 and 1 on one node, 2 and 3 on another."""
    node, place = divmod(rank, 2)
    node_group: Any = f"node {node}"
    place_group: Any = f"place {place}"
    levels = Levels(
        Members(2, place, node_group), Members(2, node, place_group), SideStream(torch.device("cpu"))
    )
    return Members(4, rank, None).with_levels(levels)


def test_each_rank_gets_the_sum_of_a_range_of_its_own_and_all_gather_all(pairs: Pairs) -> None:
    flats = [torch.arange(8.0) * 10**rank for rank in range(4)]

    def run(rank: int) -> list[float]:
        pairs.thread.rank = rank
        own = members_of(rank)
        scatter = start_scatter(flats[rank], own)
        assert scatter.is_done()
        scatter.finish()
        summed = own.range_in(flats[rank]).clone()
        flats[rank].fill_(-1.0)
        own.range_in(flats[rank]).copy_(summed)
        start_gather(flats[rank], own).wait()
        found: list[float] = summed.tolist()
        return found

    with ThreadPoolExecutor(4) as threads:
        summed = list(threads.map(run, range(4)))
    # What is left of a scatter inside of a node are halves; each node has one quarter of each.
    assert [members_of(rank).position for rank in range(4)] == [0, 2, 1, 3]
    assert summed == [[0.0, 1111.0], [4444.0, 5555.0], [2222.0, 3333.0], [6666.0, 7777.0]]
    assert all(flat.tolist() == [1111.0 * element for element in range(8)] for flat in flats)


def test_what_is_summed_whole_takes_no_notice_of_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda flat, **_: summed.append(flat) or Done())
    own = members_of(2)
    whole = Members(4, own.position, None, sums_whole=True, gathers_whole=True, levels=own.levels)
    flat = torch.arange(8.0)
    start_scatter(flat, whole).finish()
    assert scatter_buffer_bytes(flat, whole) == 0
    start_gather(flat, whole).wait()
    assert [each is flat for each in summed] == [True, True]
    assert flat.tolist() == [0.0, 0.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]


def test_a_scatter_takes_the_buffer_of_its_first_part(pairs: Pairs) -> None:
    assert scatter_buffer_bytes(torch.zeros(8), members_of(0)) == 32


def test_on_a_gpu_the_second_part_waits_on_the_side_for_what_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    current = ["compute"]

    @contextmanager
    def within(stream: object) -> Iterator[None]:
        current.append("side")
        yield
        current.pop()

    cuda = SimpleNamespace(current_stream=lambda _: current[-1], stream=within)
    stream = SimpleNamespace(device="cuda", wait_stream=lambda other: said.append(f"side waits for {other}"))
    monkeypatch.setattr(side_stream, "_stream", lambda _: stream)
    monkeypatch.setattr(torch, "cuda", cuda)
    with SideStream(SimpleNamespace(type="cuda")).behind_compute():  # type: ignore[arg-type]
        said.append(f"starts on {current[-1]}")
    said.append(f"goes on on {current[-1]}")
    assert said == ["side waits for compute", "starts on side", "goes on on compute"]


def test_a_gather_inside_of_a_node_starts_when_what_it_hands_on_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    class Slow(Done):
        def __init__(self, group: str) -> None:
            super().__init__()
            self._group = group

        def wait(self, timeout: object = None) -> bool:
            said.append(f"waits for {self._group}")
            return True

    def start(own: Tensor, *, group: str, **_: object) -> Slow:
        said.append(f"starts {group}")
        return Slow(group)

    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(dist, "isend", start)
    monkeypatch.setattr(dist, "irecv", start)
    start_gather(torch.zeros(8), members_of(1))
    assert said == ["starts place 1"] * 2 + ["waits for place 1"] * 2 + ["starts node 0"] * 2


def test_a_pool_s_groups_go_over_the_communicators_of_their_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of four: a sum inside of its node and then between, a gather the other way round."""
    over: list[tuple[int, ...] | None] = []

    def start(*_: Any, group: Any = None, **__: Any) -> Done:
        over.append(group)
        return Done()

    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: tuple(ranks))
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    for name in ("all_to_all_single", "isend", "irecv", "all_reduce"):
        monkeypatch.setattr(dist, name, start)
    nodes = ((0, 1), (2, 3))
    group = ParameterGroup(0, (0, 1, 2, 3), (("p", 0),), 64, 64, (0,), (0,), (0, 1), nodes=nodes)
    made = [Communicator(0, (0, 1, 2, 3), Purpose.EVERYONE)]
    made += [
        Communicator(1 + index, ranks, Purpose.SUMS) for index, ranks in enumerate((*nodes, *group.across))
    ]
    pool = GradientPool((group,), {"p": nn.Parameter(torch.ones(16))}, Communicators(made, 10), rank=1)
    pool.start_sum(0)
    pool.start_gather(0)
    assert over == [(0, 1), (1, 3), (1, 3), (1, 3), (0, 1), (0, 1)]
