"""Record what every test file executes, where that is not known."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from random import Random

from mutants.records import Record, Records
from mutants.workers import Worker, for_all

_AT_MOST_S = 900.0  # a whole test file


def record_all(
    records: Records,
    folder: Path,
    jobs: int,
    with_processes: bool,
    packages: Collection[str],
    *,
    only_these: bool = False,
) -> Sequence[Record]:
    """The record of every test file; those that are missing or no longer good are made.

    Args:
        records: those that there are.
        folder: of the copies of the tree.
        jobs: how many files at a time.
        with_processes: whether to make those of files with tests that start processes.
        packages: those whose tests are recorded first.
        only_these: make no records of others; those that there are count.
    """
    files = [file for file in records.test_files() if with_processes or not _starts_processes(file)]
    found = {file: records.read(file) for file in files}
    missing = [file for file, record in found.items() if record is None]
    if only_these:
        missing = [file for file in missing if Path(file).parts[1] in packages]
    Random().shuffle(missing)  # so that a run beside this one records others
    missing.sort(key=lambda file: Path(file).parts[1] not in packages)
    if missing:
        print(f"recording what {len(missing)} test files execute", flush=True)

    def do(worker: Worker, file: str) -> Record | str:
        if known := records.read(file):
            return known
        answer = worker.ask({"record": True, "groups": [[file, []]], "seconds": _AT_MOST_S})
        return records.write(file, answer, worker.tree.root) if "lines" in answer else str(answer)

    def tell(file: str, record: Record | str) -> None:
        if isinstance(record, str):
            print(f"{file} cannot be recorded ({record}) and catches nothing", flush=True)
            return
        found[file] = record
        spent_s = sum(record.seconds.values())
        left_out = f", {len(record.not_passed)} skipped or failing" if record.not_passed else ""
        print(f"{file}: {len(record.seconds)} tests, {spent_s:.1f} s{left_out}", flush=True)

    for_all(missing, do, tell, folder, jobs)
    return [record for record in found.values() if record is not None]


def _starts_processes(file: str) -> bool:
    return "mark.processes" in Path(file).read_text()
