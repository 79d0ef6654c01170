"""Whose a run's folder is: one launch's, with all of its nodes, as long as it lives.

`workers/owner-N.json` are the claims to a folder, in the order in which they were made. A launch makes the
next one, which appears at once and whole or, where another was quicker, not at all; it may, if every claim
that still lives is of another node of the same run. So of two that come together one is first, also on a disk
that several hosts share, without the locks of any file system.

A claim lives until it says that it has ended. One whose process is gone is dead: told by its id on the same
host (`process_space` and `started_s` name a process so that another one can check it), and elsewhere by no
sign of life (the file's time, which a thread sets anew) for `LOST_S`. Claims are not deleted, so that no
number comes twice.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, ClassVar, Literal

import psutil
from pydantic import Field

from spindle_cli.errors import InputError, RunFailedError, UsageError
from spindle_cli.files.artifact import Artifact, to_json
from spindle_cli.files.request import workers_dir
from spindle_cli.files.writing import write_new, write_text
from spindle_cli.launch.run_dir import CLAIM, has_run, prepare_run_dir
from spindle_cli.launch.types import NodeShare
from spindle_cli.plan.types import Plan
from spindle_cli.units import format_seconds

_SAME_START_S = 5.0  # clocks are set while machines run, and process starts are told from when they booted
_SPACE_FILES = (Path("/proc/sys/kernel/random/boot_id"),)
BEAT_S = 5.0
LOST_S = 60.0  # without a sign of life from another host


def host_name() -> str:
    """This machine's name, for people."""
    return socket.gethostname()


def process_space() -> str:
    """Where process ids mean what they mean here: the machine since it was booted, and its container."""
    return " ".join((host_name(), *map(_first_line, _SPACE_FILES), _namespace()))


def started_s() -> float:
    """When this process was started, in seconds since the epoch."""
    return psutil.Process().create_time()


def is_running(pid: int, process_started_s: float) -> bool:
    """Whether a process of this `process_space` still runs, and is no other that has got its id since."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return abs(process.create_time() - process_started_s) <= _SAME_START_S
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # somebody else's: it is there
        return True


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "-"


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "-"


class Owner(Artifact):
    """A claim to a run's folder.

    Attributes:
        run: The same for all nodes of one launch, and for no other.
        node_rank: The node that claims.
        host: The host of the launcher's process.
        pid: The id of that process.
        space: Where the id means this process.
        started_s: When the process was started, in seconds since the epoch.
        since_s: When it claimed.
        ended: Whether it is a claim no more.
    """

    KIND: ClassVar[str] = "owner"

    schema_: Annotated[Literal["spindle.owner/1"], Field(alias="schema")] = "spindle.owner/1"
    run: str
    node_rank: Annotated[int, Field(ge=0)]
    host: str
    pid: Annotated[int, Field(ge=0)]
    space: str
    started_s: float
    since_s: float
    ended: bool = False

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process has claimed."""
        return self.space == process_space() and self.pid == os.getpid()


class HeldError(UsageError):
    """Another launch has the run's folder."""


@dataclass(frozen=True)
class Claim:
    """A claim that was found. `owner`: None where the file cannot be read. `quiet_s`: since the last sign of
    life.
    """

    number: int
    owner: Owner | None
    quiet_s: float

    @property
    def lives(self) -> bool:
        """Say whether the claim still holds: its process runs, as far as that can be seen from here."""
        if self.owner is None:
            return self.quiet_s < LOST_S
        if self.owner.ended:
            return False
        if self.owner.space == process_space():
            return is_running(self.owner.pid, self.owner.started_s)
        return self.quiet_s < LOST_S

    def lets_in(self, run: str, node_rank: int) -> bool:
        """Whether this node of this run may hold the folder too."""
        owner = self.owner
        if owner is None or owner.run != run:
            return False
        return owner.node_rank != node_rank or owner.is_of_this_process

    def __str__(self) -> str:
        heard = f"last heard of {format_seconds(max(self.quiet_s, 0))} ago"
        if self.owner is None:
            return f"a launch whose claim cannot be read, {heard}"
        since = datetime.fromtimestamp(self.owner.since_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.owner.pid} on {self.owner.host} since {since}, {heard}"


def run_of(plan: Plan, share: NodeShare) -> str:
    """What all nodes of one launch have in common, and nothing else has: on one node its process, on several
    where they meet and what they run.
    """
    words = (
        ("one", process_space(), str(os.getpid()), f"{started_s():.0f}")
        if share.num_nodes == 1
        else ("several", str(share.master), plan.sha256())
    )
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def living_claims(run_dir: Path) -> tuple[Claim, ...]:
    """Every claim to a folder that holds, by what this host's clock says."""
    return tuple(claim for claim in _claims(run_dir, time.time()) if claim.lives)


def require_open(run_dir: Path, run: str, node_rank: int) -> None:
    """Refuse a folder that another launch has.

    Raises:
        HeldError: it has; says who.
    """
    _require_open(run_dir, living_claims(run_dir), run, node_rank)


def _require_open(run_dir: Path, claims: tuple[Claim, ...], run: str, node_rank: int) -> None:
    for claim in claims:
        if not claim.lets_in(run, node_rank):
            raise HeldError(
                f"{run_dir}: a run is going on in it: it is held by {claim}",
                hint="Wait for it to end, or choose another folder with --run-dir. What has died is taken "
                f"over: on this host at once, of another after {LOST_S:g} s without a sign of life.",
            )


def _claims(run_dir: Path, now_s: float) -> Iterator[Claim]:
    for path in workers_dir(run_dir).glob(f"{CLAIM}*.json"):
        number = path.stem.removeprefix(CLAIM)
        if not number.isdecimal():
            continue
        owner = None
        with suppress(InputError):
            owner = Owner.read(path)
        with suppress(FileNotFoundError):
            yield Claim(int(number), owner, now_s - path.stat().st_mtime)


def _file_system_time(folder: Path) -> float:
    """Now, by the clock that gives files their times: on a shared disk not this host's."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".spindle-") as file:
        return os.fstat(file.fileno()).st_mtime


class Hold:
    """This process's hold on the folder of the run that it launches; none at first.

    `is_new`: the folder was made for it.
    """

    def __init__(self) -> None:
        self.run_dir: Path | None = None
        self.is_new = False
        self._path: Path | None = None
        self._owner: Owner | None = None
        self._over = threading.Event()
        self._successor: list[Claim] = []

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def take(self, run_dir: Path, run: str, node_rank: int) -> None:
        """Claim a folder, which is made if it is not there, unless this process holds it already.

        Raises:
            HeldError: another launch has it.
            InputError: it cannot be written.
        """
        if self.run_dir == run_dir:
            return
        assert self.run_dir is None, "one at a time"
        is_new = not run_dir.exists()
        folder = prepare_run_dir(run_dir)
        while True:
            claims = tuple(_claims(run_dir, _file_system_time(folder)))
            _require_open(run_dir, tuple(claim for claim in claims if claim.lives), run, node_rank)
            owner = _own_claim(run, node_rank)
            path = folder / f"{CLAIM}{max((claim.number for claim in claims), default=0) + 1}.json"
            if write_new(path, to_json(owner)):
                break
        self.run_dir, self.is_new, self._path, self._owner = run_dir, is_new, path, owner
        self._over = threading.Event()
        threading.Thread(target=self._beat, args=(self._over,), name="owner", daemon=True).start()

    def beat(self) -> None:
        """Give a sign of life, and look whether another launch has taken over."""
        run_dir, path, owner = self.run_dir, self._path, self._owner
        if run_dir is None or path is None or owner is None:
            return
        os.utime(path)
        own_number = int(path.stem.removeprefix(CLAIM))
        self._successor = [
            claim
            for claim in living_claims(run_dir)
            if claim.number > own_number and not claim.lets_in(owner.run, owner.node_rank)
        ]

    def require(self) -> None:
        """Make sure that the folder is still there, and still ours.

        Raises:
            RunFailedError: it is not.
        """
        if self._path is None:
            return
        if not self._path.exists():
            gone = "deleted" if self.run_dir is not None and not self.run_dir.exists() else "emptied"
            raise RunFailedError(
                f"{self.run_dir}: the run's folder was {gone} while the run went on",
                hint="What has been trained since the last checkpoint that is left elsewhere is lost.",
            )
        if self._successor:
            raise RunFailedError(
                f"{self.run_dir}: taken over by {self._successor[0]}, as this launch gave no sign of life "
                f"for {LOST_S:g} s (a machine asleep, a disk that hung)",
                hint="That launch goes on with the run.",
            )

    def release(self) -> None:
        """Say that this claim has ended; a folder that was made for it, with nothing begun in it, goes."""
        run_dir, path, owner = self.run_dir, self._path, self._owner
        self._over.set()
        self.run_dir = self._path = self._owner = None
        if run_dir is None or path is None or owner is None:
            return
        with suppress(OSError, InputError):  # it may be gone, or its disk
            if self.is_new and not has_run(run_dir):
                shutil.rmtree(run_dir)
            elif path.exists():
                write_text(path, to_json(owner.model_copy(update={"ended": True})))

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(BEAT_S):
            with suppress(OSError):  # whoever watches the run looks whether it is there
                self.beat()


def _own_claim(run: str, node_rank: int) -> Owner:
    return Owner(
        run=run,
        node_rank=node_rank,
        host=host_name(),
        pid=os.getpid(),
        space=process_space(),
        started_s=started_s(),
        since_s=time.time(),
    )
