"""The score of each area, and the survivors with what changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mutants.areas import area_of
from mutants.excuses import PATH, Excuse
from mutants.making import File
from mutants.results import Result
from mutants.trying import Bug

WANTED = 0.9


def report(
    drawn: Sequence[tuple[Bug, Result]], files: Mapping[Path, File], excuses: Mapping[str, Excuse]
) -> float:
    """Print survivors and scores; the score of all, of those that are not excused."""
    survivors = [(bug, result) for bug, result in drawn if not result.caught]
    for bug, result in survivors:
        if bug.mutant.name not in excuses:
            print(f"\n{bug.mutant.name}\n{_met(result)}\n{files[bug.mutant.path].diff(bug.mutant)}")
    print(f"\n{'area':12}{'tried':>6}{'caught':>8}{'excused':>9}{'survive':>9}{'score':>8}")
    areas = dict.fromkeys(area_of(bug.mutant.path) for bug, _ in drawn)
    for area in areas:
        _row(area, [pair for pair in drawn if area_of(pair[0].mutant.path) == area], excuses)
    return _row("all", drawn, excuses)


def _row(area: str, drawn: Sequence[tuple[Bug, Result]], excuses: Mapping[str, Excuse]) -> float:
    caught = sum(result.caught for _, result in drawn)
    excused = sum(not result.caught and bug.mutant.name in excuses for bug, result in drawn)
    counted = len(drawn) - excused
    score = caught / counted if counted else 1.0
    print(f"{area:12}{len(drawn):6}{caught:8}{excused:9}{counted - caught:9}{score:8.1%}")
    return score


def _met(result: Result) -> str:
    if not result.tests:
        return "no test runs it"
    more = f"; {result.left_out} more run it, but take too long" if result.left_out else ""
    return f"met {result.tests} tests{more}"


def wrong_excuses(
    excuses: Mapping[str, Excuse], tried: Sequence[tuple[Bug, Result]], gone: Sequence[str]
) -> list[str]:
    """What is wrong with the excuses: their mutant is gone, or is caught."""
    caught = [
        f"{PATH}: {bug.mutant.name} is excused, but {result.by} catches it: remove the excuse"
        for bug, result in tried
        if result.caught and bug.mutant.name in excuses
    ]
    return caught + [f"{PATH}: there is no mutant {name} any more: remove the excuse" for name in gone]
