"""What became of each mutant, one JSON document a line, so that a later run goes on where one stopped."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """What became of a mutant.

    Attributes:
        mutant: its name.
        key: hash of the file with the bug and of the tests that decided: with another key it is tried again.
        caught: whether a test failed.
        by: which, or what else ended it; "" if nothing did.
        why: the last line of what the test said.
        seconds: from the start of its tests to the end.
        tests: how many tests it could meet.
        left_out: how many more run the line but take too long.
    """

    mutant: str
    key: str
    caught: bool
    by: str
    why: str
    seconds: float
    tests: int
    left_out: int


class Results:
    """The file of results; several processes may add to it."""

    def __init__(self, path: Path) -> None:
        """Args: path: of the file, which need not exist yet."""
        self._path = path
        self._known: dict[str, Result] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                # A run that was killed may have left half a line.
                if line.endswith("}"):
                    result = Result(**json.loads(line))
                    self._known[result.mutant] = result

    def last(self, mutant: str) -> Result | None:
        """A mutant's last result, whatever has changed since."""
        return self._known.get(mutant)

    def add(self, result: Result) -> None:
        """Keep a result, in one write."""
        self._known[result.mutant] = result
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, (json.dumps(asdict(result)) + "\n").encode())
        finally:
            os.close(file)


def key_of(text: str, tests: str) -> str:
    """A result's key, of the file with the bug and the key of the tests that decided."""
    return hashlib.sha256(f"{text}\0{tests}".encode()).hexdigest()[:16]
