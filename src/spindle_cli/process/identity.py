"""Which process this is, in words that another process can check: maybe later, maybe on another machine."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

_SAME_START_S = 5.0  # clocks are set while machines run, and process starts are told from when they booted


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


_SPACE_FILES = (Path("/proc/sys/kernel/random/boot_id"),)


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
