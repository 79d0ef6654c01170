"""A worker's journal: at which action of its program its host is, and how far its device has come.

One small file per worker, mapped into its memory, so that a note is a store and is there for others to read
whatever the worker hangs in, and after its process has been aborted.

    magic, batches of a step; begun: batch, action, time; done: batch, action, time; one line for each action
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"spindle1"
_HEADER = struct.Struct("<8sq")
_NOTE = struct.Struct("<qqd")
_BEGUN = _HEADER.size
_DONE = _BEGUN + _NOTE.size
_LABELS = _DONE + _NOTE.size
_NOTHING = -1


@dataclass(frozen=True)
class Note:
    """`batch`: of the run, counted from 0; `action`: of the program; `time_s`: since the epoch."""

    batch: int
    action: int
    time_s: float


class JournalWriter:
    """A worker's side."""

    def __init__(
        self, path: Path, actions: Sequence[str], batches_per_step: int, first_batch: int = 0
    ) -> None:
        """Begin anew.

        Args:
            path: of the file.
            actions: what each is, for people, without line breaks.
            batches_per_step: of every task.
            first_batch: of this run.
        """
        labels = "\n".join(actions).encode()
        notes = _NOTE.pack(_NOTHING, _NOTHING, 0.0) + _NOTE.pack(first_batch - 1, len(actions) - 1, 0.0)
        path.write_bytes(_HEADER.pack(_MAGIC, batches_per_step) + notes + labels)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def begun(self, note: Note) -> None:
        """The host is at an action."""
        _NOTE.pack_into(self._memory, _BEGUN, note.batch, note.action, note.time_s)

    def done(self, note: Note) -> None:
        """The device has done this action, and all before it."""
        _NOTE.pack_into(self._memory, _DONE, note.batch, note.action, note.time_s)


@dataclass(frozen=True)
class Journal:
    """What a journal says. `begun`: None where the host has begun nothing. `done`: before the first action is
    done, the last one of the batch before.
    """

    actions: tuple[str, ...]
    batches_per_step: int
    begun: Note | None
    done: Note

    @classmethod
    def read(cls, path: Path) -> Journal | None:
        """Reads a journal; None where there is none, or none that is whole."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if len(data) <= _LABELS:
            return None
        magic, batches_per_step = _HEADER.unpack_from(data)
        if magic != _MAGIC or batches_per_step < 1:
            return None
        begun, done = (Note(*_NOTE.unpack_from(data, offset)) for offset in (_BEGUN, _DONE))
        actions = tuple(data[_LABELS:].decode(errors="replace").split("\n"))
        if not -1 <= done.action < len(actions):
            return None
        return cls(actions, batches_per_step, None if begun.batch == _NOTHING else begun, done)

    @property
    def current(self) -> tuple[int, int] | None:
        """(batch, action) of the first action that is begun and not done; None where all are done."""
        begun, done = self.begun, self.done
        if begun is None or (begun.batch, begun.action) <= (done.batch, done.action):
            return None
        if done.action + 1 < len(self.actions):
            return done.batch, done.action + 1
        return done.batch + 1, 0

    def place(self) -> str | None:
        """'step 3, in the forward pass of slice a/b[0:2]'; None where nothing is under way."""
        if self.current is None:
            return None
        batch, action = self.current
        return f"step {batch // self.batches_per_step + 1}, in {self.actions[action]}"
