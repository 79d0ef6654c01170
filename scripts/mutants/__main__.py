"""Put small bugs into the code, one at a time, and see whether a test notices.

    make mutants [MUTANTS_ARGS='--seed S --count N --area AREA --only TEXT --list']

Draws a sample of all such bugs with a seed, as many of each area, and runs for each the tests that execute
its line, the quickest first, until one fails: in copies of the working tree, two at a time. Prints every bug
that no test noticed, and the score of each area; exits with 1 if fewer than 90 % were noticed of those that
are not excused (`scripts/mutants/excuses.yaml`), or if an excuse is no longer true. Results are kept in
`build/mutants`: a run that is stopped goes on where it was, and tests that are added are tried alone.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mutants.areas import AREAS, area_of, files_of
from mutants.excuses import PATH, read_excuses
from mutants.making import File, Mutant
from mutants.recording_all import record_all
from mutants.records import Records
from mutants.report import WANTED, report, wrong_excuses
from mutants.results import Result, Results
from mutants.sampling import sample
from mutants.trying import Bug, prepare, try_all

BUILD = Path("build/mutants")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    parser.add_argument(
        "--count", type=int, default=200, help="how many, over all areas (default: %(default)s)"
    )
    parser.add_argument("--area", action="append", choices=AREAS, help="only these (default: all)")
    parser.add_argument("--only", help="instead of a sample, all mutants with this text in their names")
    parser.add_argument("--list", action="store_true", help="print the mutants that would be tried, and stop")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: %(default)s)")
    parser.add_argument(
        "--budget", type=float, default=60.0, help="seconds of tests for a mutant (default: %(default)s)"
    )
    parser.add_argument("--no-processes", action="store_true", help="leave out tests that start processes")
    parser.add_argument(
        "--near", action="store_true", help="record the tests of the areas' own packages alone, where missing"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    root = Path.cwd()
    areas = given.area or list(AREAS)
    files = {path: File(path, (root / path).read_text()) for area in areas for path in files_of(area, root)}
    drawn = _drawn(files, areas, given)
    if given.list:
        for mutant in drawn:
            print(f"{mutant.name} line {mutant.line}: {mutant.before} -> {mutant.after}")
        return 0
    by_name = {mutant.name: mutant for file in files.values() for mutant in file.mutants}
    excuses = {
        name: excuse
        for name, excuse in read_excuses(root / PATH).items()
        if area_of(Path("src/spindle_cli") / name.split(":")[0]) in areas
    }
    excused = [by_name[name] for name in excuses if name in by_name]
    tried = list({mutant.name: mutant for mutant in [*drawn, *excused]}.values())
    pairs: list[tuple[Bug, Result]] = []
    for area in areas:
        of_area = [mutant for mutant in tried if area_of(mutant.path) == area]
        pairs += _try_area(area, of_area, files, given)
    names = {mutant.name for mutant in drawn}
    print(f"\nseed {given.seed}, {len(drawn)} mutants")
    score = report([pair for pair in pairs if pair[0].mutant.name in names], files, excuses)
    wrong = wrong_excuses(excuses, pairs, sorted(set(excuses) - set(by_name)))
    print("\n".join(wrong))
    return 1 if wrong or score < WANTED else 0


def _try_area(
    area: str, mutants: Sequence[Mutant], files: Mapping[Path, File], given: argparse.Namespace
) -> list[tuple[Bug, Result]]:
    """Record what is not recorded yet, and try an area's mutants."""
    trees, with_processes = BUILD / "trees", not given.no_processes
    records = record_all(
        Records(BUILD / "records", Path.cwd()),
        trees,
        given.jobs,
        with_processes,
        AREAS[area],
        only_these=given.near,
    )
    results = Results(BUILD / "results.jsonl")
    bugs = prepare(mutants, files, records, given.budget, with_processes)
    try_all(bugs, results, trees, given.jobs)
    return [(bug, result) for bug in bugs if (result := bug.known(results))]


def _drawn(files: dict[Path, File], areas: Sequence[str], given: argparse.Namespace) -> list[Mutant]:
    of_area: dict[str, list[Mutant]] = {area: [] for area in areas}
    for path, file in files.items():
        of_area[area_of(path)].extend(file.mutants)
    if given.only is not None:
        return [mutant for mutants in of_area.values() for mutant in mutants if given.only in mutant.name]
    return sample(of_area, given.count, given.seed)


if __name__ == "__main__":
    sys.exit(main())
