"""Which tests a mutant meets, in which order, and for how long."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mutants.areas import SOURCE
from mutants.making import Mutant
from mutants.records import Record

_QUICK_S = 1.0
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
        key: hash of everything that the outcome depends on but the mutant.
    """

    groups: Sequence[tuple[str, Sequence[str]]]
    seconds: float
    limits: dict[str, float]
    left_out: int
    key: str


def choose(mutant: Mutant, records: Iterable[Record], budget_s: float, with_processes: bool) -> Trial:
    """Choose the tests that run a mutant's lines.

    First those that take less than a second, then the others, then those that start processes, then the
    rest of the files whose tests share what runs the lines (a plan made once for all, a class made when its
    file is loaded). Among each kind, files in the folder of tests that is named as the mutant's package go
    first, then the file with the quickest test.

    Args:
        mutant: where.
        records: of all test files.
        budget_s: what all tests may take without a bug: later ones are left out. Those that start processes
            have as much again.
        with_processes: whether to take tests that start processes.
    """
    stages: tuple[list[tuple[bool, float, str, list[str]]], ...] = ([], [], [], [])
    package = mutant.path.relative_to(SOURCE).parts[0]
    seconds: dict[str, float] = {}
    keys: list[str] = []
    for record in records:
        direct, any_at_all = record.tests_of(mutant.path, mutant.line, mutant.last_line)
        if not any_at_all:
            continue
        keys.append(record.key)
        seconds |= record.seconds
        order = sorted(record.seconds, key=lambda test: record.seconds[test])
        plain = [test for test in order if test not in record.processes]
        split: tuple[list[str], ...] = (
            [test for test in plain if test in direct and record.seconds[test] < _QUICK_S],
            [test for test in plain if test in direct and record.seconds[test] >= _QUICK_S],
            [test for test in order if test in direct and test in record.processes and with_processes],
            [test for test in plain if test not in direct],
        )
        for stage, tests in zip(stages, split, strict=True):
            if tests:
                is_far = not record.file.startswith(f"tests/{package}/")
                stage.append((is_far, record.load_s + record.seconds[tests[0]], record.file, tests))
    groups: list[tuple[str, list[str]]] = []
    left_out = 0
    spent_s, spent_with_processes_s = 0.0, 0.0
    for number, stage in enumerate(stages):
        for *_, file, tests in sorted(stage):
            taken: list[str] = []
            for test in tests:
                spent = spent_with_processes_s if number == 2 else spent_s
                if spent and spent + seconds[test] > budget_s:
                    left_out += number < 3
                    continue
                if number == 2:
                    spent_with_processes_s += seconds[test]
                else:
                    spent_s += seconds[test]
                taken.append(test)
            if taken:
                groups.append((file, taken))
    limits = {test: _TIMES * seconds[test] + _MORE_S for _, tests in groups for test in tests}
    key = hashlib.sha256(repr((groups, sorted(keys))).encode()).hexdigest()[:16]
    return Trial(groups, spent_s + spent_with_processes_s, limits, left_out, key)
