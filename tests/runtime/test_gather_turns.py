"""Gathers that take turns: on which stream each is started, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spindle_cli.runtime.backends.gather_turns import GatherTurns
from spindle_cli.runtime.communication import collectives
from spindle_cli.runtime.communication.buckets import ShardedBucket
from spindle_cli.runtime.communication.collectives import Members
from spindle_cli.runtime.communication.gradients import GradientPool


@dataclass
class Streams:
    """Stands in for a GPU's streams, and keeps what was asked of them, with the stream that was current."""

    said: list[tuple[str, str]] = field(default_factory=list)
    current: str = "compute"

    @contextmanager
    def within(self, stream: Side) -> Iterator[None]:
        self.current, before = "side", self.current
        yield
        self.current = before

    def start(self) -> Work:
        self.said.append(("start", self.current))
        return Work(self)


@dataclass
class Side:
    streams: Streams
    device: str = "cuda"

    def wait_stream(self, other: str) -> None:
        self.streams.said.append((f"side waits for {other}", self.streams.current))


@dataclass
class Work:
    streams: Streams

    def wait(self) -> None:
        self.streams.said.append(("wait", self.streams.current))


def test_a_gather_on_a_gpu_waits_for_what_is_computed_and_for_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are started, and waited for, on the side; on the stream that computes nothing waits."""
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Side(streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.within)
    turns = GatherTurns(torch.device("cuda"))
    for _ in range(2):
        assert isinstance(turns.take(streams.start), Work)  # type: ignore[arg-type]
    one = [("side waits for compute", "compute"), ("start", "side"), ("wait", "side")]
    assert streams.said == 2 * one


def test_on_a_cpu_gathers_start_at_once() -> None:
    streams = Streams()
    turns = GatherTurns(torch.device("cpu"))
    for _ in range(2):
        turns.take(streams.start)  # type: ignore[arg-type]
    assert streams.said == 2 * [("start", "compute")]


class Turns(GatherTurns):
    """Counts who takes one."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.taken = 0

    def take(self, start: Callable[[], Any]) -> Any:
        self.taken += 1
        return super().take(start)


PADDED = Members(2, 0, None, weights=(1, 2), cuts=(0, 1, 4), pads_gather=True)


@pytest.mark.parametrize("members", [Members(2, 0, None), PADDED])
def test_a_gather_takes_the_turn_that_it_is_given_also_of_a_padded_copy(
    monkeypatch: pytest.MonkeyPatch, members: Members
) -> None:
    monkeypatch.setattr(collectives, "_start_gather", lambda *_: Work(Streams()))
    turns = Turns()
    collectives.start_gather(torch.zeros(4), members, turns)
    assert turns.taken == 1
    collectives.start_gather(torch.zeros(4), members)
    assert turns.taken == 1


def test_what_a_program_gathers_behind_its_update_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = object.__new__(GradientPool)
    given: list[object] = []
    bucket = object.__new__(ShardedBucket)
    monkeypatch.setattr(ShardedBucket, "start_gather", lambda _, turns=None: given.append(turns))
    pool._part = SimpleNamespace(buckets={7: (bucket, bucket)})  # type: ignore[assignment]
    pool._watch = None
    pool._turns = Turns()
    pool.start_gather(7)
    assert given == [pool._turns, pool._turns]
