"""When gradient sums start: while the slice that completes them is still running backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from spindle_cli.program.types import Action, Kind


class SumStarter:
    """Starts one rank's gradient sums in the program's order, each as soon as its last op is through.

    A program lists the sums behind the slice that completes them, each with the op of it that does; one
    without starts when the program comes to it.
    """

    def __init__(self, actions: Sequence[Action], start: Callable[[int], None]) -> None:
        """`actions`: of the rank. `start`: starts the sum of a group."""
        self._start = start
        self._after: dict[int, list[Action]] = {}
        backward: int | None = None
        for action in actions:
            if action.kind is Kind.BACKWARD:
                backward = action.piece
            elif action.kind is Kind.SUM and backward is not None and action.op is not None:
                self._after.setdefault(backward, []).append(action)
        self._waiting: deque[Action] = deque()

    def watched(self, piece: int) -> dict[int, Callable[[], None]]:
        """Ops of a slice that complete a sum, with what to call when their backward is through."""
        return {
            action.op: partial(self._op_done, action.op)
            for action in self._after.get(piece, ())
            if action.op is not None
        }

    def begin(self, piece: int) -> None:
        """A slice is about to run backward."""
        assert not self._waiting, "every sum is started before the next slice runs backward"
        self._waiting.extend(self._after.get(piece, ()))

    def reach(self, action: Action) -> None:
        """The program has come to a sum: start it if its op did not."""
        if action.op is None:
            assert action.group is not None, "a sum names its group"
            self._start(action.group)
        elif action in self._waiting:
            self._start_through(action)

    def _op_done(self, op: int) -> None:
        ready = [action for action in self._waiting if action.op is not None and action.op >= op]
        if ready:
            self._start_through(ready[-1])

    def _start_through(self, action: Action) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            assert first.group is not None, "a sum names its group"
            self._start(first.group)
            if first == action:
                return
