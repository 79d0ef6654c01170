"""Files of a run that are read again only when they have changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from spindle_cli.errors import InputError

T = TypeVar("T")
Stamp = tuple[int, int, int] | None


def stamp_of(path: Path) -> Stamp:
    """What is another as soon as a file is; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class Kept(Generic[T]):
    """What is made of some files, and made again when one of them is another.

    Attributes:
        value: as of the last `refresh`.
        problem: why nothing could be made of the files; `value` is then what stands for nothing.
        version: how often it was made.
    """

    def __init__(self, make: Callable[[], T], nothing: T) -> None:
        self._make = make
        self._nothing = nothing
        self._stamps: tuple[Stamp, ...] | None = None
        self.value = nothing
        self.problem: str | None = None
        self.version = 0

    def refresh(self, *paths: Path) -> bool:
        """Look whether one of the files is another, and make it again then; whether that was so."""
        stamps = tuple(map(stamp_of, paths))
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        self.version += 1
        try:
            self.value, self.problem = self._make(), None
        except InputError as error:
            self.value, self.problem = self._nothing, error.message
        return True
