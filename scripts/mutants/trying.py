"""Put one bug into a copy of the tree and see whether a test fails."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mutants.choosing import Trial, choose
from mutants.making import File, Mutant
from mutants.records import Record
from mutants.results import Result, Results, key_of
from mutants.workers import Worker, for_all

# What hangs where pytest cannot end it is ended from outside, after so many times what its tests take without
# the bug, and so many seconds more.
_TIMES, _MORE_S = 5.0, 120.0


@dataclass(frozen=True)
class Bug:
    """A mutant with its file's text and its tests."""

    mutant: Mutant
    text: str
    trial: Trial

    def key(self, caught_by: str) -> str:
        """Of a result of it."""
        return key_of(self.text, self.trial.key(caught_by))

    def known(self, results: Results) -> Result | None:
        """Its result, if there is one that is still good."""
        last = results.last(self.mutant.name)
        return last if last is not None and last.key == self.key(last.by) else None


def prepare(
    mutants: Sequence[Mutant],
    files: Mapping[Path, File],
    records: Sequence[Record],
    budget_s: float,
    with_processes: bool,
) -> list[Bug]:
    """Find each mutant's text and tests."""
    bugs = []
    for mutant in mutants:
        text = files[mutant.path].mutated(mutant)
        trial = choose(mutant, records, budget_s, with_processes)
        bugs.append(Bug(mutant, text, trial))
    return bugs


def try_all(bugs: Sequence[Bug], results: Results, folder: Path, jobs: int) -> None:
    """Try the bugs that have no result yet, and keep the results."""
    left = [bug for bug in bugs if bug.known(results) is None]
    print(f"{len(bugs)} mutants, {len(bugs) - len(left)} of them known", flush=True)
    number = 0

    def tell(bug: Bug, result: Result) -> None:
        nonlocal number
        number += 1
        results.add(result)
        said = f"caught by {result.by}" if result.caught else f"SURVIVES {result.tests} tests"
        print(f"{number}/{len(left)} {bug.mutant.name} {said} ({result.seconds:.0f} s)", flush=True)

    for_all(left, lambda worker, bug: _try(worker, bug, results), tell, folder, jobs)


def _try(worker: Worker, bug: Bug, results: Results) -> Result:
    last = results.last(bug.mutant.name)
    trial = _catcher_first(bug.trial, last.by if last is not None else "")
    began = time.monotonic()
    count = sum(len(tests) for _, tests in bug.trial.groups)
    result = Result(bug.mutant.name, "", False, "", "", 0.0, count, trial.left_out)
    if not count:
        return replace(result, key=bug.key(""))
    with worker.tree.changed(bug.mutant.path, bug.text):
        seconds = _TIMES * trial.seconds + _MORE_S
        answer = worker.ask({"groups": trial.groups, "limits": trial.limits, "seconds": seconds})
    if "by" in answer:
        result = replace(result, caught=True, by=answer["by"], why=answer["why"])
    elif "late" in answer or "died" in answer:
        result = replace(result, caught=True, by="its tests", why=f"did not end as they should: {answer}")
    return replace(result, key=bug.key(result.by), seconds=round(time.monotonic() - began, 1))


def _catcher_first(trial: Trial, catcher: str) -> Trial:
    """The test that caught the mutant before, before the others."""
    for file, tests in trial.groups:
        if catcher in tests:
            return replace(trial, groups=[(file, [catcher]), *trial.groups])
    return trial
