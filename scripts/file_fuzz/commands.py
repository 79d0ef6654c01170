"""Which commands read which file, and what a command may do about a damaged one."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest import mock

from file_fuzz.files import CLUSTER_FILE, METRICS, PLAN, PROFILE, WORKLOAD_FILE

# Ends of a command that reads a file of the user's; a bug of ours (70), a traceback or a signal is none.
ENDS = (0, 1, 3, 4)
MAX_MESSAGE = 6000  # characters; some quote what an edited plan breaks, rule by rule
# What would move a terminal's cursor or colour it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_READERS: dict[str, tuple[str, ...]] = {
    PROFILE: (
        f"plan {PROFILE} --cluster {CLUSTER_FILE} -o out.yaml",
        f"plan {PROFILE} --cluster {CLUSTER_FILE} -o out.yaml --strategy sequential",
        f"check {PLAN} --profile {PROFILE}",
        f"compare {PROFILE} --cluster {CLUSTER_FILE}",
        f"sweep {PROFILE} --cluster {CLUSTER_FILE}",
        f"explain {PLAN} --profile {PROFILE}",
        f"report {PLAN} --profile {PROFILE} -o out.html",
    ),
    CLUSTER_FILE: (
        f"plan {PROFILE} --cluster {CLUSTER_FILE} -o out.yaml",
        f"compare {PROFILE} --cluster {CLUSTER_FILE}",
        f"sweep {PROFILE} --cluster {CLUSTER_FILE}",
    ),
    PLAN: (
        f"check {PLAN}",
        f"check {PLAN} --profile {PROFILE} -o out.yaml",
        f"show {PLAN}",
        f"show {PLAN} --rank 0",
        f"simulate {PLAN}",
        f"simulate {PLAN} --trace out.json",
        f"report {PLAN} -o out.html",
        f"diff {PLAN} whole/{PLAN}",
        f"explain {PLAN} --profile {PROFILE}",
        f"launch {PLAN} --dry-run",
        f"verify {PLAN}",
    ),
    METRICS: (f"report {PLAN} --run run -o out.html",),
    WORKLOAD_FILE: (
        f"profile {WORKLOAD_FILE} -o out.json --estimate --device h100 --cluster {CLUSTER_FILE}",
    ),
}
_WEIGHTS = {PROFILE: 8, CLUSTER_FILE: 4, PLAN: 10, METRICS: 3, WORKLOAD_FILE: 1}


@dataclass(frozen=True)
class Case:
    """A file to damage, and the command that is to read it."""

    file: str
    words: tuple[str, ...]


def draw_case(random: Random) -> Case:
    """One at random."""
    file = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    return Case(file, tuple(random.choice(_READERS[file]).split()))


@dataclass(frozen=True)
class Ended:
    """How a command ended in this process."""

    code: int
    out: str
    err: str


def run(words: tuple[str, ...]) -> Ended:
    """`spindle WORDS`, through its real entry point."""
    from spindle_cli.__main__ import main

    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", ["spindle", *words]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        else:
            code = 0
    return Ended(code, out.getvalue(), err.getvalue())


def what_is_wrong(case: Case, ended: Ended, folder: Path) -> str | None:
    """What a user would complain of; None: nothing."""
    if ended.code not in ENDS:
        return f"exit code {ended.code}: {ended.err.strip()[-400:]}"
    if "Traceback" in ended.err:
        return f"a traceback: {ended.err[-400:]}"
    if found := _CONTROL.search(ended.out + ended.err):
        return f"writes {found[0]!r} to the terminal"
    if ended.code in (3, 4) and len(re.findall(r"^error: ", ended.err, re.M)) != 1:
        return f"exit code {ended.code} without one message: {ended.err[-400:]!r}"
    if ended.code != 0 and len(ended.err) > MAX_MESSAGE:
        return f"a message of {len(ended.err)} characters: {ended.err[:200]!r}"
    named = (Path(case.file).name, *(word for word in case.words if "." in word), "workload")
    if ended.code == 3 and not any(name in ended.err for name in named):
        return f"a message that names no file: {ended.err!r}"
    left = [path.name for path in folder.iterdir() if path.name.startswith((".", "tmp"))]
    return f"leaves {left}" if left else None
