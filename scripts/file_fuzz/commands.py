"""Which commands read which file, and what a command may do about a damaged one."""

from __future__ import annotations

import io
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import typer

from file_fuzz.names import (
    CAPTURE,
    CLUSTER_FILE,
    ERROR,
    EXITS,
    INDEX,
    JOURNAL,
    MEMO,
    METRICS,
    OWNER,
    PLAN,
    PREDICTED,
    PROFILE,
    REQUEST,
    RUN,
    RUN_PLAN,
    SHARD,
    SUMS,
    TIMELINE,
    TINY_PLAN,
    TINY_PROFILE,
    TRAINED_METRICS,
    WORKLOAD_FILE,
)
from spindle_cli.cli.printable import printable
from spindle_cli.errors import ExitCode, SpindleError

# Ends of a command that reads a file of the user's; a bug of ours (70), a traceback or a signal is none.
ENDS = (0, 1, 3, 4)
MAX_MESSAGE = 6000  # characters; some quote what an edited plan breaks, rule by rule
# What would move a terminal's cursor or colour it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_RESUME = f"launch {TINY_PLAN} --run-dir {RUN} --resume"
_CALIBRATE = f"calibrate {RUN} {TINY_PROFILE} -o out.json"
_HISTORY = f"plan {TINY_PROFILE} --cluster {CLUSTER_FILE} -o out.yaml --history ."
_OF_CHECKPOINTS = (
    _RESUME,
    f"launch {TINY_PLAN} --run-dir new --from {RUN}",
    f"export {RUN} -o out.safetensors",
    "read checkpoint",
)
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
    TINY_PLAN: (
        _RESUME,
        f"launch {TINY_PLAN} --run-dir new",
        f"verify {TINY_PLAN}",
        f"report {TINY_PLAN} --run {RUN} -o out.html",
    ),
    INDEX: _OF_CHECKPOINTS,
    SUMS: _OF_CHECKPOINTS,
    SHARD: _OF_CHECKPOINTS,
    TRAINED_METRICS: (_RESUME, "read metrics", f"report {TINY_PLAN} --run {RUN} -o out.html"),
    PREDICTED: (f"report {TINY_PLAN} --run {RUN} -o out.html", _CALIBRATE, _HISTORY),
    TIMELINE: (f"report {TINY_PLAN} --run {RUN} -o out.html", "read trace", _CALIBRATE),
    RUN_PLAN: (_CALIBRATE, _HISTORY),
    TINY_PROFILE: (_CALIBRATE, _HISTORY),
    OWNER: (_RESUME, "read claims"),
    REQUEST: ("read request",),
    MEMO: ("read memo",),
    EXITS: ("read failure",),
    ERROR: ("read failure",),
    JOURNAL: ("read journal", "read failure"),
    CAPTURE: ("read capture",),
    WORKLOAD_FILE: (
        f"profile {WORKLOAD_FILE} -o out.json --estimate --device h100 --cluster {CLUSTER_FILE}",
    ),
}
_WEIGHTS = {PROFILE: 8, CLUSTER_FILE: 4, PLAN: 10, METRICS: 3, WORKLOAD_FILE: 1, INDEX: 6, SHARD: 4}
# What a command changes of what it reads.
_CHANGED = {TRAINED_METRICS}


@dataclass(frozen=True)
class Case:
    """A file to damage, and the command that is to read it."""

    file: str
    words: tuple[str, ...]

    @property
    def keeps_file(self) -> bool:
        """Whether the command leaves the file as it is."""
        return self.file not in _CHANGED


def draw_case(random: Random) -> Case:
    """One at random."""
    weights = [_WEIGHTS.get(file, 2) for file in _READERS]
    file = random.choices(list(_READERS), weights)[0]
    return Case(file, tuple(random.choice(_READERS[file]).split()))


@dataclass(frozen=True)
class Ended:
    """How a command ended in this process."""

    code: int
    out: str
    err: str


def run(words: tuple[str, ...]) -> Ended:
    """`spindle WORDS`, through its real entry point, up to where it would start workers; or `read NAME`."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), ExitStack() as stack:
        for patch in _patches(words):
            stack.enter_context(patch)
        code = _read(words[1]) if words[0] == "read" else _command(words)
    return Ended(code, out.getvalue(), err.getvalue())


def _command(words: tuple[str, ...]) -> int:
    from spindle_cli.__main__ import main

    with mock.patch.object(sys, "argv", ["spindle", *words]):
        try:
            main()
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _read(name: str) -> int:
    """Call a reader; its errors are shown as a command's are."""
    from file_fuzz.readers import READERS

    try:
        READERS[name]()
    except SpindleError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 70
    return 0


def _patches(words: tuple[str, ...]) -> Sequence[AbstractContextManager[Any]]:
    """What keeps a command from starting workers, and lets this machine be one of GPUs."""
    if "--dry-run" in words or words[0] not in ("launch", "verify"):
        return ()

    def started(*_: object) -> None:
        raise typer.Exit

    return (
        mock.patch("spindle_cli.launch.starting.head_start.HeadStart.begin"),
        mock.patch("spindle_cli.launch.attempts.Attempts.run", started),
        mock.patch("spindle_cli.launch.run.missing_devices", return_value=()),
        mock.patch("spindle_cli.launch.run.missing_devices", return_value=()),
        mock.patch("spindle_cli.verify.run.train", started),
    )


def what_is_wrong(case: Case, ended: Ended, folder: Path) -> str | None:
    """What a user would complain of; None: nothing."""
    if ended.code not in ENDS and not (ended.code == ExitCode.USAGE and case.file == OWNER):
        return f"exit code {ended.code}: {ended.err.strip()[-400:]}"
    if "Traceback" in ended.err:
        return f"a traceback: {ended.err[-400:]}"
    if found := _CONTROL.search(ended.out + ended.err):
        return f"writes {found[0]!r} to the terminal"
    if ended.code in (3, 4) and len(re.findall(r"^error: ", ended.err, re.M)) != 1:
        return f"exit code {ended.code} without one message: {ended.err[-400:]!r}"
    if ended.code != 0 and len(ended.err) > MAX_MESSAGE:
        return f"a message of {len(ended.err)} characters: {ended.err[:200]!r}"
    named = (Path(case.file).name, *(word for word in case.words if "." in word), "workload", RUN)
    if ended.code == 3 and not any(name in ended.err for name in named):
        return f"a message that names no file: {ended.err!r}"
    left = [path.name for path in folder.iterdir() if path.name.startswith((".", "tmp"))]
    return f"leaves {left}" if left else None
