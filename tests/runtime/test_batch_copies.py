"""Batches are copied to a GPU on a stream of their own, one ahead; here one that copies when awaited."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_parts import make_batches
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.feeds import feed_of
from spindle_cli.runtime.memory import copy_stream
from spindle_cli.runtime.step.counting import Counting, Portion
from spindle_cli.runtime.step.data import Feed
from spindle_cli.runtime.step.losses import CountLayout

PORTION = Portion("t", (0, 6), ("x",))
STEPS = 4


class Late:
    """A stream that copies when another one waits for it; `order`: of all that was ordered."""

    def __init__(self, order: list[str]) -> None:
        self.order = order
        self.due: list[tuple[torch.Tensor, torch.Tensor]] = []

    def wait_stream(self, compute: Compute) -> None:
        self.order.append("copies wait for compute")

    def copies(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.order.append(f"copy of {source.sum().item():.0f}")
        self.due.append((target, source))


class Event:
    stream: Late

    def record(self, stream: Late) -> None:
        self.stream = stream
        self.ends_at = len(stream.due)


class Compute:
    def __init__(self, order: list[str]) -> None:
        self.order = order

    def wait_event(self, event: Event) -> None:
        self.order.append("compute waits for a copy")
        for target, source in event.stream.due[: event.ends_at]:
            target.copy_(source)


class Copying(TorchDispatchMode):
    def __init__(self, stream: Late) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket is torch.ops.aten.copy_:
            assert kwargs is None or not kwargs
            target, source, non_blocking = args
            assert non_blocking
            self.stream.copies(target, source)
            return target
        return func(*args, **(kwargs or {}))


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU's streams are told, in order."""
    order: list[str] = []
    stream, compute = Late(order), Compute(order)

    @contextmanager
    def on(asked: Late) -> Iterator[None]:
        with Copying(asked):
            yield

    monkeypatch.setattr(copy_stream.CopyStream, "is_apart", True)
    monkeypatch.setattr(copy_stream, "_event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: compute)
    monkeypatch.setattr(torch.cuda, "stream", on)
    init = copy_stream.CopyStream.__init__

    def with_stream(self: copy_stream.CopyStream, device: torch.device) -> None:
        init(self, device)
        self._stream = stream  # type: ignore[assignment]

    monkeypatch.setattr(copy_stream.CopyStream, "__init__", with_stream)
    return order


class Items:
    """Sample i has the value i."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((1,), float(index))}


def make_feed(**changes: Any) -> Feed:
    return feed_of(make_batches(Items()), (PORTION,), range(STEPS), **changes)


def sums() -> list[float]:
    """Of the values of each batch."""
    batches = make_batches(Items())["t"]
    return [sum(batches.indices(number), start=0.0) for number in range(STEPS)]


def copy_ahead(feed: Feed, number: int) -> None:
    """Until a batch is loaded, and on its way."""
    until = time.monotonic() + 60
    while number not in feed._copies._begun:
        assert time.monotonic() < until
        time.sleep(0.01)
        feed._copy_ahead()


def test_the_next_batch_is_on_its_way_while_one_is_computed_with(order: list[str]) -> None:
    feed, found = make_feed(), []
    feed.take()
    for number in range(1, STEPS):
        copy_ahead(feed, number)
        begun = list(order)
        found.append(feed.take().fields("t", (0, 6), ["x"])["x"].sum().item())
        expected = ["copies wait for compute", f"copy of {sums()[number]:.0f}"]
        assert begun[-2:] == expected  # ahead of it; to take it is no more than to wait
        assert order[len(begun)] == "compute waits for a copy"
    assert found == sums()[1:]


def test_to_take_a_batch_starts_the_copy_of_the_next_one_that_is_loaded(order: list[str]) -> None:
    """Where losses are counted ahead, it is there."""
    feed = make_feed(counting=Counting((), CountLayout({"t": slice(0, 1)}, 1)))
    for number in range(STEPS):
        order.clear()
        assert feed.take().fields("t", (0, 6), ["x"])["x"].sum().item() == sums()[number]
        first = ["copies wait for compute", f"copy of {sums()[number]:.0f}"] if number == 0 else []
        ahead = ["copies wait for compute", f"copy of {sums()[number + 1]:.0f}"] if number < STEPS - 1 else []
        assert order == [*first, "compute waits for a copy", *ahead]


def test_nobody_waits_for_a_batch_that_is_not_loaded(order: list[str]) -> None:
    """Read by the main thread: nothing is copied ahead, and every batch has its numbers."""
    feed = make_feed(reads_ahead=False)
    found = [feed.take().fields("t", (0, 6), ["x"])["x"].sum().item() for _ in range(STEPS)]
    assert found == sums()
    assert order[:3] == ["copies wait for compute", f"copy of {sums()[0]:.0f}", "compute waits for a copy"]
    assert len(order) == 3 * STEPS


def test_what_nobody_takes_is_given_up_behind_its_copy(order: list[str]) -> None:
    feed = make_feed(counting=Counting((), CountLayout({"t": slice(0, 1)}, 1)))
    feed.take()
    order.clear()
    feed.close()
    assert order == ["compute waits for a copy"]
