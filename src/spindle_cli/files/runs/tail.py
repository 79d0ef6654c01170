"""Follow a run that goes on: each whole line of a file that another process still writes, once, as they come;
and how long the run will still take.
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from spindle_cli.errors import InputError

CHUNK_BYTES = 2**20
# Of what has been read, so much is looked at again to tell a file that was written anew in its place.
ANCHOR_BYTES = 256
# Steps over which the pace is taken: enough to be calm, few enough to follow a change.
RECENT_STEPS = 20


@dataclass(frozen=True)
class NewLines:
    """What one look has found.

    Attributes:
        begun_anew: the file is another one than at the last look: everything read before is void.
        lines: by number from 1, without their ends.
        left_bytes: that a further look would read at once.
    """

    begun_anew: bool
    lines: tuple[tuple[int, bytes], ...]
    left_bytes: int


class Tail:
    """Hands out each line of a growing file once; a line without its end waits for the rest of it."""

    def __init__(self, path: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.path = path
        self._chunk_bytes = chunk_bytes
        self._identity: tuple[int, int] | None = None
        self._restart()

    def _restart(self) -> None:
        self.offset = 0
        self._rest = b""
        self._number = 0
        self._anchor = b""

    def rewind(self) -> None:
        """Hand all lines out once more, from the file's beginning."""
        self._restart()

    def look(self) -> NewLines:
        """At most a chunk of what is new. A file that is not there has no lines.

        Raises:
            InputError: it cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                file.seek(self.offset - len(self._anchor))
                is_other = identity != self._identity or file.read(len(self._anchor)) != self._anchor
                anew = is_other and self.offset > 0
                if is_other:
                    self._restart()
                    self._identity = identity
                file.seek(self.offset)
                read = file.read(self._chunk_bytes)
        except FileNotFoundError:
            anew = self.offset > 0
            self._restart()
            return NewLines(anew, (), 0)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}") from error
        self.offset += len(read)
        self._anchor = (self._anchor + read)[-ANCHOR_BYTES:]
        *whole, self._rest = (self._rest + read).split(b"\n")
        first = self._number + 1
        self._number += len(whole)
        return NewLines(anew, tuple(enumerate(whole, start=first)), max(status.st_size - self.offset, 0))


class Pace:
    """The usual time of a run's latest steps, and what comes between them."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._first_s: float | None = None
        self._inside_s = self._outside_s = 0.0
        self._steps = 0

    def add(self, iteration_s: float, seen_s: float | None = None) -> None:
        """One step more; `seen_s`: when it was seen to have ended, where somebody looks all the time."""
        self._recent.append(iteration_s)
        if seen_s is None:
            return
        if self._first_s is None:
            self._first_s = seen_s
            return
        self._steps += 1
        self._inside_s += iteration_s
        self._outside_s = seen_s - self._first_s - self._inside_s

    @property
    def between_s(self) -> float:
        """The seconds between one step and the next that are part of neither, in the mean since the first
        step seen.
        """
        return max(self._outside_s, 0.0) / self._steps if self._steps else 0.0

    @property
    def step_s(self) -> float | None:
        """The median of the latest steps; None before the first."""
        return statistics.median(self._recent) if self._recent else None

    def left_s(self, steps_left: int, between_s: float = 0.0) -> float | None:
        """Seconds until the last step ends; None before the first one has.

        `between_s`: of each step in the mean, what is no part of it: evaluations, checkpoints.
        """
        step_s = self.step_s
        return None if step_s is None else (step_s + between_s) * max(steps_left, 0)
