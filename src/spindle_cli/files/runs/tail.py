"""Read a file that another process still writes: each whole line once, as they come."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from spindle_cli.errors import InputError

CHUNK_BYTES = 2**20
# Of what has been read, so much is looked at again to tell a file that was written anew in its place.
ANCHOR_BYTES = 256


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
        """Hand everything out once more."""
        self._restart()

    def look(self) -> NewLines:
        """At most a chunk of what is new. A file that is not there has no lines.

        Raises:
            InputError: it cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                identity = (found.st_dev, found.st_ino)
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
        return NewLines(anew, tuple(enumerate(whole, start=first)), max(found.st_size - self.offset, 0))
