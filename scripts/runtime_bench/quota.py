"""A slow host: a control group (cgroup) whose processes are granted a part of the cores' time.

Version 1's `cpu.cfs_quota_us` or version 2's `cpu.max`. In each period the group's processes are stopped once
they have used up what they are granted. Until then they go before the machine's other processes, which have
the rest, so that a host is as fast as it is meant to be, whatever else runs. Needs root.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from runtime_bench.errors import BenchError

ROOT = Path("/sys/fs/cgroup")
# Short, so that passes are slow from their beginning: what is granted is used up before anything stops.
PERIOD_US = 10_000
# The largest weights that groups may have.
_FIRST, _FIRST_OF_VERSION_2 = 262_144, 10_000
_NUMBERS = count()


@dataclass(frozen=True)
class Quota:
    """A control group. `cores`: cores' worth of time that its processes are granted together."""

    folder: Path
    cores: float

    def command(self, words: Sequence[str | Path]) -> list[str]:
        """`words`, run by a process of the group."""
        joins = f'echo $$ > {self.folder / "cgroup.procs"} && exec "$@"'
        return ["sh", "-c", joins, "sh", *(str(word) for word in words)]

    def take(self, processes: Iterable[int]) -> None:
        """Move running processes here, with all of their threads.

        Raises:
            BenchError: they cannot be moved.
        """
        for number in processes:
            try:
                (self.folder / "cgroup.procs").write_text(str(number))
            except ProcessLookupError:  # it has ended
                continue
            except OSError as error:
                raise BenchError(f"{self.folder}: process {number} cannot be moved there: {error}") from error


@contextmanager
def granting(cores: float) -> Iterator[Quota]:
    """A group that is granted so much, gone afterwards.

    Raises:
        BenchError: the kernel has no such groups here, or refuses one.
    """
    is_old = (ROOT / "cpu" / "cpu.cfs_quota_us").exists()
    parent = ROOT / "cpu" if is_old else ROOT
    folder = parent / f"spindle-bench-{os.getpid()}-{next(_NUMBERS)}"
    try:
        folder.mkdir()
        _grant(folder, round(cores * PERIOD_US), is_old=is_old)
    except OSError as error:
        raise BenchError(f"{folder}: no control group with a quota of processor time: {error}") from error
    try:
        yield Quota(folder, cores)
    finally:
        with suppress(OSError):  # a process that has not ended yet keeps it
            folder.rmdir()


def _grant(folder: Path, quota_us: int, *, is_old: bool) -> None:
    if is_old:
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        (folder / "cpu.shares").write_text(str(_FIRST))
        return
    with suppress(OSError):  # it may be there already
        (folder.parent / "cgroup.subtree_control").write_text("+cpu")
    (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    (folder / "cpu.weight").write_text(str(_FIRST_OF_VERSION_2))
