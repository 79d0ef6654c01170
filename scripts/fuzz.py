"""Damage whole files at random, and see that every command that reads them ends as it should.

    python scripts/fuzz.py [--seconds T] [--cases N] [--seed S] [--first K]

As it should: done, or with one short message that names the file and the exit code for it; never as a bug of
Spindle's, with a traceback, by a signal, for longer than 90 s of the processor's time or with more than 3 GiB
of memory, and with nothing that moves a terminal's cursor. The seed is new each time unless given, and is
printed; a case that fails is printed with the command that runs it again, and its file is kept. Exits with 1
if one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from file_fuzz.commands import draw_case, run, what_is_wrong
from file_fuzz.damage import damaged_file
from file_fuzz.files import write_files
from file_fuzz.names import CHECKPOINT
from file_fuzz.run_folder import seal

# Of the processor, so that a busy machine changes nothing; and of the clock, for what only waits.
PROCESSOR_S, CLOCK_S = 90, 600
MEMORY = 3 * 2**30
_SEALED = 0.7  # of damaged checkpoints, how many have checksums that are right all the same
_PER_CHILD = 40  # cases that one forked process runs: it may die of one


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="stop after so long (default: %(default)s)"
    )
    parser.add_argument("--cases", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--seed", type=int, help="of all cases (default: a new one)")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first case (default: %(default)s)"
    )
    given = parser.parse_args()
    seed = int.from_bytes(os.urandom(4)) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    kept = Path(tempfile.mkdtemp(prefix="spindle-fuzz-"))
    whole = kept / "whole"
    whole.mkdir()
    write_files(whole)
    begin, number, failed = time.monotonic(), given.first, 0
    end = given.first + given.cases
    while number < end and time.monotonic() - begin < given.seconds:
        until = begin + given.seconds
        number, said = _run_some(seed, range(number, min(end, number + _PER_CHILD)), whole, kept, until)
        failed += len(said)
        for line in said:
            print(line, flush=True)
    print(f"{number - given.first} cases in {time.monotonic() - begin:.0f} s, {failed} failed")
    if not failed:
        shutil.rmtree(kept)
    return 1 if failed else 0


def _run_some(seed: int, numbers: range, whole: Path, kept: Path, until: float) -> tuple[int, list[str]]:
    """Run cases in a process of their own, until a time; the next case's number, and what is wrong with
    these.
    """
    results = kept / "results"
    results.write_text("")
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            _limit_memory()
            for number in numbers:
                _note(results, f"begin {number}")
                if (wrong := _run_one(seed, number, whole, kept)) is not None:
                    _note(results, f"wrong {number} {wrong}")
                if time.monotonic() > until:
                    break
            code = 0
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    notes = [line.split(" ", 2) for line in results.read_text().splitlines()]
    last = max(int(note[1]) for note in notes)
    said = [f"case {note[1]}: {note[2]}\n  {_again(seed, note[1])}" for note in notes if note[0] == "wrong"]
    if status != 0:
        ended = os.waitstatus_to_exitcode(status)
        how = (
            "took too long" if -ended in (signal.SIGALRM, signal.SIGPROF) else f"ended the process ({ended})"
        )
        said.append(f"case {last}: {how}\n  {_again(seed, last)}")
    return last + 1, said


def _run_one(seed: int, number: int, whole: Path, kept: Path) -> str | None:
    random = Random(f"{seed}-{number}")  # noqa: S311 - reproducible, not secret
    case = draw_case(random)
    folder = kept / f"case-{number}"
    shutil.copytree(whole, folder)
    shutil.copytree(whole, folder / "whole")
    path = folder / case.file
    path.write_bytes(damaged_file(path, random))
    if CHECKPOINT in case.file and random.random() < _SEALED:
        seal(path.parent)
    before = path.read_bytes()
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
    signal.alarm(CLOCK_S)
    with contextlib.chdir(folder):
        ended = run(case.words)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)
    wrong = what_is_wrong(case, ended, folder)
    if wrong is None and case.keeps_file and path.read_bytes() != before:
        wrong = "changes the file that it reads"
    if wrong is None:
        shutil.rmtree(folder)
        return None
    return f"spindle {' '.join(case.words)}, in {folder}: {wrong}".replace("\n", "\\n")


def _again(seed: int, number: int | str) -> str:
    return f"again: make fuzz FUZZ_ARGS='--seed {seed} --first {number} --cases 1'"


def _note(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(line + "\n")


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


if __name__ == "__main__":
    sys.exit(main())
