"""Commands of a check, inside the time that is left for all of it and for a step of it, with their logs."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

SCRIPTS = Path(__file__).resolve().parent.parent
ROOT = SCRIPTS.parent
# Less than this is not worth to begin with.
LEAST_S = 15.0
_PACKING, _SHARING = threading.Lock(), threading.Lock()
# Beside the table: what the command says that runs just now, and what all others have said.
RUNNING, PACKED = ("running.out", "running.err"), "logs.tar.gz"


class NotReachedError(Exception):
    """No time is left for a command, or it did not end inside of what was left.

    `out`: what it had printed by then. `had_s`: the seconds that it had; None: it was not begun.
    """

    def __init__(self, out: str = "", had_s: float | None = None) -> None:
        super().__init__("no time was left" if had_s is None else f"did not end in {had_s:.0f} s")
        self.out = out


class CommandFailedError(Exception):
    """A command ended with another exit code than 0; the end of what it said. `out`: what it printed."""

    def __init__(self, said: str, out: str = "", code: int = 1) -> None:
        super().__init__(said)
        self.out, self.code = out, code


@dataclass
class Made:
    """What several ask for and one makes; or how that failed. None: nobody has tried."""

    found: str | CommandFailedError | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass
class Commands:
    """Runs commands until the budget, or that of a step, is spent.

    `folder`: where logs are kept, and packed as `PACKED` behind each command, so that they are there whenever
    the check is stopped. `run`: as `run_until`; another one in tests.
    """

    budget_s: float
    folder: Path | None = None
    run: Run = field(default_factory=lambda: run_until)
    clock: Callable[[], float] = time.monotonic
    begun_s: float = field(init=False)
    _until_s: float = field(init=False)
    _logs: dict[str, list[str]] = field(init=False, default_factory=dict)
    _made: dict[str, Made] = field(init=False, default_factory=dict)
    _step: str = "start"

    def __post_init__(self) -> None:
        self.begun_s = self.clock()
        self._until_s = self.begun_s + self.budget_s

    @property
    def spent_s(self) -> float:
        """Seconds since the begin."""
        return self.clock() - self.begun_s

    @property
    def left_s(self) -> float:
        """Seconds for what is under way."""
        return min(self.begun_s + self.budget_s, self._until_s) - self.clock()

    @contextmanager
    def step(self, name: str, limit_s: float) -> Iterator[None]:
        """Inside, commands have so much time all together, and one log."""
        self._step, self._until_s = name, self.clock() + limit_s
        try:
            yield
        finally:
            self._until_s = self.begun_s + self.budget_s

    @contextmanager
    def beside(self, name: str) -> Iterator[Commands]:
        """Commands of the same step with a log of their own, that may run beside others."""
        ours = Commands(self.left_s, None, self.run, self.clock)
        ours._step, ours._logs, ours._made = name, self._logs, self._made
        try:
            yield ours
        finally:
            with _PACKING:
                if self.folder is not None:
                    pack(self.folder / PACKED, dict(self._logs))

    def once(self, what: str, make: Callable[[], str]) -> str:
        """What `make` gives, which is called once for all that ask for the same: the others wait.

        Raises:
            CommandFailedError: it failed, also where it was another's.
            NotReachedError: its time was up; whoever asks next tries again.
        """
        with _SHARING:
            made = self._made.setdefault(what, Made())
        with made.lock:
            if isinstance(made.found, CommandFailedError):
                raise made.found
            if made.found is None:
                try:
                    made.found = make()
                except CommandFailedError as error:
                    made.found = error
                    raise
            return made.found

    def spindle(self, *arguments: str | Path, variables: Mapping[str, str] | None = None) -> str:
        """What a command of spindle printed on standard output."""
        return self.python("-m", "spindle_cli", *arguments, variables=variables)

    def python(
        self,
        *arguments: str | Path,
        folder: Path = ROOT,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """The same of a program in Python, with these variables of the environment beside its own.

        Raises:
            NotReachedError: there was no time.
            CommandFailedError: it failed.
        """
        left_s = self.left_s
        if left_s < min(LEAST_S, self.budget_s):
            raise NotReachedError
        command = [sys.executable, *map(str, arguments)]
        where = [None if self.folder is None else self.folder / name for name in RUNNING]
        environment = {**os.environ, **(variables or {})}
        begun_s = self.clock()
        try:
            ended = self.run(command, cwd=folder, timeout=left_s, env=environment, files=where)
        except subprocess.TimeoutExpired as error:
            out = str(error.output or "")
            self._keep(command, out, str(error.stderr or ""), f"stopped after {left_s:.0f} s")
            raise NotReachedError(out, left_s) from error
        said = f"exit code {ended.returncode} after {self.clock() - begun_s:.1f} s"
        self._keep(command, ended.stdout, ended.stderr, said)
        if ended.returncode:
            raise CommandFailedError(
                _last_lines(ended.stdout, ended.stderr, ended.returncode), ended.stdout, ended.returncode
            )
        return ended.stdout

    def _keep(self, command: Sequence[str], out: str, err: str, said: str) -> None:
        text = f"$ {' '.join(command)}\n{out}\n{err}\n[{said}]\n\n"
        self._logs.setdefault(self._step, []).append(text)
        if self.folder is not None:
            pack(self.folder / PACKED, self._logs)


def pack(path: Path, logs: Mapping[str, Sequence[str]]) -> None:
    """Write texts as files of an archive, which takes the place of the last one at once."""
    new = path.with_name(f"{path.name}.new")
    with tarfile.open(new, "w:gz", compresslevel=3) as archive:
        for number, (name, texts) in enumerate(logs.items()):
            content = "".join(texts).encode()
            info = tarfile.TarInfo(f"logs/{number:02}-{name.replace('/', '-').replace(' ', '-')}.log")
            info.size, info.mtime = len(content), int(time.time())
            archive.addfile(info, io.BytesIO(content))
    new.replace(path)


def run_until(
    command: Sequence[str],
    *,
    cwd: Path,
    timeout: float,
    env: Mapping[str, str],
    files: Sequence[Path | None],
) -> subprocess.CompletedProcess[str]:
    """Run a command, and end all that it has started when its time is up. `files`: where its standard output
    and error are written meanwhile.

    Raises:
        TimeoutExpired: its time was up; with what it had said.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out, err = (path or Path(scratch) / name for path, name in zip(files, RUNNING, strict=True))
        with out.open("w") as out_file, err.open("w") as err_file:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                end_all(process)
                raise subprocess.TimeoutExpired(command, timeout, _text(out), _text(err)) from None
            except BaseException:
                end_all(process)
                raise
        return subprocess.CompletedProcess(list(command), code, _text(out), _text(err))


def end_all(process: subprocess.Popen[Any]) -> None:
    """A command, its children and theirs; launchers start sessions of their own."""
    family: list[psutil.Process] = []
    try:
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, psutil.NoSuchProcess):
        pass
    for each in family:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def found_in(out: str) -> Iterator[dict[str, Any]]:
    """What a probe has printed: an object a line, among other lines."""
    for line in out.splitlines():
        if line.startswith('{"probe"'):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # it was stopped while it wrote
                return


def _last_lines(out: str, err: str, code: int) -> str:
    lines: Sequence[str] = [line.strip() for line in (err or out).splitlines() if line.strip()]
    return f"exit code {code}: {' / '.join(lines[-2:])}"[:300]
