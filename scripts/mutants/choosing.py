"""Which tests a mutant meets, in which order, and for how long."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mutants.areas import SOURCE
from mutants.making import Mutant
from mutants.records import Record

_QUICK_S = 1.0
_WITH_PROCESSES = 2  # of the stages below
# A test hangs that takes so many times as long as without a bug, and so many seconds more: others use the
# machine too.
_TIMES, _MORE_S = 10.0, 20.0


@dataclass(frozen=True)
class Trial:
    """The tests of one mutant.

    Attributes:
        groups: test files with the tests of each, in the order in which they run.
        seconds: of all of them, without a bug.
        limits: seconds after which each test counts as hanging.
        left_out: how many tests that run the line were left out, as they take too long.
        keys: of the records of all files that run the line.
    """

    groups: Sequence[tuple[str, Sequence[str]]]
    seconds: float
    limits: dict[str, float]
    left_out: int
    keys: Mapping[str, str]

    def key(self, caught_by: str) -> str:
        """Hash of what an outcome depends on but the mutant: all tests where none caught it, else that one's
        file.
        """
        file = caught_by.split("::")[0]
        decided_by = self.keys[file] if file in self.keys else (self.groups, sorted(self.keys.items()))
        return hashlib.sha256(repr(decided_by).encode()).hexdigest()[:16]


class _Entry(NamedTuple):
    """Tests of one file, in the order of their files."""

    is_far: bool
    first_s: float
    file: str
    tests: list[str]


def choose(mutant: Mutant, records: Iterable[Record], budget_s: float, with_processes: bool) -> Trial:
    """Choose the tests that run a mutant's lines.

    First those that take less than a second, then the others, then those that start processes, then the
    rest of the files whose tests share what runs the lines (a plan made once for all, a class made when its
    file is loaded). Among each kind, files in the folder of tests that is named as the mutant's package go
    first, then the file with the quickest test.

    Args:
        mutant: where.
        records: of all test files.
        budget_s: what all tests, and loading them, may take without a bug: later ones are left out. Those
            that start processes have as much again.
        with_processes: whether to take tests that start processes.
    """
    package = mutant.path.relative_to(SOURCE).parts[0]
    stages: tuple[list[_Entry], ...] = ([], [], [], [])
    by_file: dict[str, Record] = {}
    for record in records:
        direct, any_at_all = record.tests_of(mutant.path, mutant.line, mutant.last_line)
        if not any_at_all:
            continue
        by_file[record.file] = record
        is_far = not record.file.startswith(f"tests/{package}/")
        for stage, tests in zip(stages, _by_kind(record, set(direct), with_processes), strict=True):
            if tests:
                first_s = record.load_s + record.seconds[tests[0]]
                stage.append(_Entry(is_far, first_s, record.file, tests))
    groups, left_out, spent_s = _within(budget_s, [sorted(stage) for stage in stages], by_file)
    limits = {
        test: _TIMES * by_file[file].seconds[test] + _MORE_S for file, tests in groups for test in tests
    }
    keys = {file: record.key for file, record in by_file.items()}
    return Trial(groups, spent_s, limits, left_out, keys)


def _by_kind(record: Record, direct: set[str], with_processes: bool) -> tuple[list[str], ...]:
    """A file's tests, the quickest first: quick, slow, with processes, and those that do not run the lines
    themselves.
    """
    order = sorted(record.seconds, key=lambda test: record.seconds[test])
    plain = [test for test in order if test not in record.processes]
    return (
        [test for test in plain if test in direct and record.seconds[test] < _QUICK_S],
        [test for test in plain if test in direct and record.seconds[test] >= _QUICK_S],
        [test for test in order if test in direct and test in record.processes and with_processes],
        [test for test in plain if test not in direct],
    )


def _within(
    budget_s: float, stages: Sequence[Sequence[_Entry]], by_file: dict[str, Record]
) -> tuple[list[tuple[str, list[str]]], int, float]:
    """The groups that the budget has room for, how many tests it has none for, and what the groups take."""
    groups: list[tuple[str, list[str]]] = []
    left_out = 0
    spent_s = [0.0, 0.0]  # without processes, and with
    for number, stage in enumerate(stages):
        purse = int(number == _WITH_PROCESSES)
        for entry in stage:
            record = by_file[entry.file]
            load_s = 0.0 if any(entry.file == file for file, _ in groups) else record.load_s
            taken: list[str] = []
            for test in entry.tests:
                cost_s = record.seconds[test] + (0.0 if taken else load_s)
                if (groups or taken) and spent_s[purse] + cost_s > budget_s:
                    left_out += number <= _WITH_PROCESSES
                    continue
                spent_s[purse] += cost_s
                taken.append(test)
            if taken:
                groups.append((entry.file, taken))
    return groups, left_out, sum(spent_s)
