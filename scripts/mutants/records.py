"""What each test file executes: recorded once, kept in `build/mutants/records`, and good while the test file
and the files whose functions it runs stay as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

_VERSION = 1  # of what is recorded, and how


@dataclass(frozen=True)
class Record:
    """What one test file executes.

    Attributes:
        file: the test file in the tree.
        key: hash of all that it was recorded of.
        seconds: of each test that passes.
        load_s: to load the file.
        processes: the tests that are marked so.
        not_passed: tests that were skipped or failed without any bug of ours.
        lines: file -> test -> lines; test `""` for what runs between tests.
    """

    file: str
    key: str
    seconds: dict[str, float]
    load_s: float
    processes: frozenset[str]
    not_passed: frozenset[str]
    lines: dict[str, dict[str, list[int]]]

    @cached_property
    def _sets(self) -> dict[str, dict[str, frozenset[int]]]:
        return {
            file: {test: frozenset(lines) for test, lines in of_test.items()}
            for file, of_test in self.lines.items()
        }

    def tests_of(self, path: Path, first: int, last: int) -> tuple[list[str], bool]:
        """The tests that run any of some lines; and whether the file does at all."""
        of_test = self._sets.get(str(path), {})
        wanted = set(range(first, last + 1))
        found = [test for test, lines in of_test.items() if lines & wanted]
        return [test for test in found if test in self.seconds], bool(found)


class Records:
    """The folder of records."""

    def __init__(self, folder: Path, root: Path) -> None:
        """Args: folder: of the records; root: of the tree that they must be good for."""
        self._folder, self._root = folder, root
        self._hashes: dict[Path, str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def test_files(self) -> list[str]:
        """Every test file of the tree but those that need a GPU."""
        paths = (path.relative_to(self._root) for path in (self._root / "tests").rglob("test_*.py"))
        return sorted(str(path) for path in paths if path.parts[1] != "gpu")

    def read(self, file: str) -> Record | None:
        """A test file's record, if it is still good."""
        path = self._path(file)
        if not path.exists():
            return None
        answer = json.loads(path.read_text())
        if answer["version"] != _VERSION or answer["inputs"] != self._inputs(file, answer, self._root):
            return None
        return self._record(file, answer)

    def write(self, file: str, answer: dict[str, Any], root: Path) -> Record:
        """Keep what was recorded in a copy of the tree with this root."""
        answer |= {"version": _VERSION, "inputs": self._inputs(file, answer, root)}
        path = self._path(file)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(answer))
        partial.rename(path)
        return self._record(file, answer)

    def _record(self, file: str, answer: dict[str, Any]) -> Record:
        not_passed = frozenset(answer["not_passed"])
        return Record(
            file,
            hashlib.sha256(json.dumps(answer["inputs"], sort_keys=True).encode()).hexdigest()[:16],
            {test: s for test, s in answer["seconds"].items() if test not in not_passed},
            answer["load_s"],
            frozenset(answer["processes"]),
            not_passed,
            answer["lines"],
        )

    def _inputs(self, file: str, answer: dict[str, Any], root: Path) -> dict[str, str]:
        executed = (path for path, of_test in answer["lines"].items() if set(of_test) - {""})
        names = {file, "constraints.txt", *executed, *self._test_code(answer)}
        return {name: self._hash(root / name) for name in sorted(names)}

    def _test_code(self, answer: dict[str, Any]) -> Iterator[str]:
        return (path for path in answer["lines"] if path.startswith("tests/"))

    def _hash(self, path: Path) -> str:
        if path not in self._hashes:
            known = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""
            self._hashes[path] = known
        return self._hashes[path]

    def _path(self, file: str) -> Path:
        return self._folder / f"{file.replace('/', '.')}.json"
