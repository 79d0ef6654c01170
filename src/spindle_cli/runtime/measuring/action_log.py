"""Keep a worker's journal: where its host is, and how far its device has come."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import torch

from spindle_cli.files.run_files import JournalWriter, Note
from spindle_cli.runtime.measuring.timing import Mark, has_passed, take_mark

# A device comes to an action long after its host; how often a thread looks how far it has come.
_LOOK_S = 0.5


class ProgramLog:
    """The notes of one of the programs that a worker's steps may run; all have one journal.

    A journal lists the actions of all programs one after the other; the last of each is the same, and the
    journal's last. So that the first that is not done is the right one, a step begins with the action before
    its program's first as done.
    """

    def __init__(self, log: ActionLog, first: int, count: int, total: int) -> None:
        """`first`: of its actions in the journal; `count`: of them; `total`: of the journal."""
        self._log = log
        self._first = first
        self._last = count - 1
        self._total = total

    @classmethod
    def all_of(cls, log: ActionLog, counts: Sequence[int]) -> tuple[ProgramLog, ...]:
        """Open a log for each of several programs with so many actions each, the last of which is the
        same.
        """
        firsts = [0, *accumulate(count - 1 for count in counts)]
        return tuple(
            cls(log, first, count, firsts[-1] + 1) for first, count in zip(firsts, counts, strict=False)
        )

    def opens(self, batch: int) -> None:
        """Note that a batch of this program begins."""
        if self._first:
            self._log.ends(batch, self._first - 1)

    def begins(self, batch: int, action: int) -> None:
        """See `ActionLog.begins`; `action`: of this program."""
        self._log.begins(batch, self._place(action))

    def ends(self, batch: int, action: int) -> None:
        """See `ActionLog.ends`; `action`: of this program."""
        self._log.ends(batch, self._place(action))

    def _place(self, action: int) -> int:
        return self._total - 1 if action == self._last else self._first + action


class ActionLog:
    """Notes each action when the host begins it, and when the device has done it; waits for neither."""

    def __init__(self, writer: JournalWriter, device: torch.device) -> None:
        self._writer = writer
        self._device = device
        self._lock = threading.Lock()
        self._ahead: deque[tuple[Mark, int, int]] = deque()
        if device.type != "cpu":  # where the host may hang while the device goes on
            threading.Thread(target=self._keep_looking, name="journal", daemon=True).start()

    def begins(self, batch: int, action: int) -> None:
        """Note that the host begins an action."""
        self._writer.begun(Note(batch, action, time.time()))

    def ends(self, batch: int, action: int) -> None:
        """The host has given its orders for an action; on a CPU it is done then."""
        with self._lock:
            self._ahead.append((take_mark(self._device), batch, action))
        self.look()

    def look(self) -> None:
        """Note the last action that the device has come to the end of."""
        last: tuple[int, int] | None = None
        with self._lock:
            while self._ahead and has_passed(self._ahead[0][0]):
                last = self._ahead.popleft()[1:]
            if last is not None:
                self._writer.done(Note(*last, time.time()))

    def _keep_looking(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            self.look()
