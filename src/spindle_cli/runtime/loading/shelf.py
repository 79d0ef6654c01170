"""Batches that are loaded and not yet taken by every rank that takes samples of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from spindle_cli.runtime.loading.failure import Failure
from spindle_cli.runtime.loading.packed import PackedBatch


@dataclass(frozen=True)
class Loaded:
    """A batch, and where its dataset is after it: what to go on from (JSON); None for a map-style one."""

    batch: PackedBatch
    state: dict[str, Any] | None


class ClosedError(Exception):
    """Nobody takes batches any more."""


class Shelf:
    """One thread puts batches on it in order; each taker, in a thread of its own, takes all of them in order.

    A batch is let go when all takers have asked for a later one.
    """

    def __init__(self, first: int, room: int, takers: Iterable[int]) -> None:
        """`first`: number of the first batch. `room`: so many lie on it at most."""
        self._changed = threading.Condition()
        self._room = room
        self._asked = dict.fromkeys(takers, first)
        self._batches: dict[int, Loaded] = {}
        self._next = first
        self._failure: Failure | None = None

    def put(self, loaded: Loaded) -> None:
        """Put the next batch on it, when there is room.

        Raises:
            ClosedError: all takers have gone.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._asked or self._next - min(self._asked.values()) < self._room
            )
            if not self._asked:
                loaded.batch.close()
                raise ClosedError
            self._batches[self._next] = loaded
            self._next += 1
            self._changed.notify_all()

    def fail(self, failure: Failure) -> None:
        """The next batch cannot be loaded: who asks for it is told why."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def take(self, taker: int, number: int) -> Loaded | Failure:
        """A batch, when it is there; those before are done with, for this taker. The batch's descriptor is
        valid until the taker asks for the next one.
        """
        with self._changed:
            self._asked[taker] = number
            self._let_go()
            self._changed.notify_all()
            self._changed.wait_for(lambda: number < self._next or self._failure is not None)
            if number < self._next:
                return self._batches[number]
            assert self._failure is not None
            return self._failure

    def leave(self, taker: int) -> None:
        """A taker has gone; the others are not held up by it."""
        with self._changed:
            self._asked.pop(taker, None)
            self._let_go()
            self._changed.notify_all()

    def wait_until_left(self) -> None:
        """Until all takers have gone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._asked)

    def _let_go(self) -> None:
        needed = min(self._asked.values(), default=self._next)
        for number in [number for number in self._batches if number < needed]:
            self._batches.pop(number).batch.close()
