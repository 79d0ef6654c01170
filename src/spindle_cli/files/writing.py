"""The one way in which files are written: whole or not at all, whatever stands where they go."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from spindle_cli.errors import InputError, UsageError

# How our files say what they are, in JSON and YAML; and where, at the latest.
_SCHEMA = re.compile(rb"""^[{\s]*["']?schema["']?\s*:\s*["']?spindle\.([a-z-]+)/""", re.MULTILINE)
_HEAD_BYTES = 4096
_FOR_ALL = 0o666  # less the process's umask, as a file that is simply opened would get


def write_text(path: Path, text: str) -> None:
    """Write a text file, see `written_whole`.

    Raises:
        InputError: it cannot be written there; an old file is untouched.
    """
    with written_whole(path) as file:
        file.write(text.encode())


def write_new(path: Path, text: str) -> bool:
    """Write a text file where there is none; False, and nothing is done, where there is one.

    It appears at once and whole: of several processes that try, also on hosts that share a disk, one
    succeeds.

    Raises:
        InputError: it cannot be written there.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".spindle-", suffix=".tmp")
        name = Path(temporary)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            name.chmod(_FOR_ALL & ~_umask())
            os.link(name, path)
        finally:
            name.unlink()
    except FileExistsError:
        return False
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written: {error.strerror}",
            hint="Check that the folder is writable, that its disk is not full, and that it has hard links.",
        ) from error
    return True


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which appears at `path` when the block ends, and only if it ends well.

    Until then it has no name, or one that nobody can have guessed, in the folder of `path`. A link goes on
    pointing at the file that it points at. What is no file (a device, a pipe) is written to as it is.

    Raises:
        InputError: the folder is missing or not writable, the path is a folder's, links go round in a circle,
            or the disk is full; an old file is untouched.
    """
    try:
        target = _resolved(path)
        if target.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if target.exists() and not target.is_file():
            with target.open("wb") as stream:
                yield stream
            return
        with _replacement(target) as file:
            yield file
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written: {error.strerror}",
            hint="Check that the folder exists and is writable, and that the disk is not full.",
        ) from error


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError as error:  # what Python 3.11 and 3.12 raise here, and nowhere else
        raise OSError(None, "its links go round in a circle") from error


@contextmanager
def _replacement(target: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `target`, a file or nothing."""
    descriptor = _open_nameless(target.parent)
    name: Path | None = None
    if descriptor is None:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".spindle-", suffix=".tmp")
        name = Path(temporary)
        name.chmod(_FOR_ALL & ~_umask())
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if name is None:
                name = _give_name(file.fileno(), target.parent)
        name.replace(target)
        name = None
    finally:
        if name is not None:
            with contextlib.suppress(OSError):
                name.unlink()


def _open_nameless(folder: Path) -> int | None:
    """A file of the folder's file system without a name: if this process is killed, nothing is left. None
    where the system or the file system has no such files.
    """
    flag = getattr(os, "O_TMPFILE", None)
    if flag is None or not Path("/proc/self/fd").is_dir():
        return None
    try:
        return os.open(folder, flag | os.O_WRONLY, _FOR_ALL)
    except OSError:
        return None  # why the folder cannot be written to, the attempt with a name will say


def _give_name(descriptor: int, folder: Path) -> Path:
    """Link a nameless file into its folder, under a name that nothing has."""
    name = folder / f".spindle-{secrets.token_hex(8)}.tmp"
    open_files = os.open("/proc/self/fd", os.O_RDONLY)
    try:  # only with a folder's descriptor does Python follow the link that stands in /proc for the file
        os.link(str(descriptor), name, src_dir_fd=open_files, follow_symlinks=True)
    finally:
        os.close(open_files)
    return name


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def require_no_input(option: str, output: Path, *inputs: Path | None) -> None:
    """Refuse to write over a file that is read.

    Args:
        option: of the output, for the message.
        inputs: files that the same command reads; None: not given.

    Raises:
        UsageError: the output is one of them, also by another path or a link.
    """
    for path in inputs:
        if path is not None and _is_same_file(output, path):
            raise UsageError(
                f"{option} {output}: this command reads that file ({path}), and would write over it",
                hint=f"Give {option} another name.",
            )


def require_no_other(option: str, output: Path, kind: str | None = None) -> None:
    """Refuse to write over a file of ours of another kind: a workload that somebody has written, a profile
    that took an hour.

    Args:
        option: of the output, for the message.
        kind: of the file that is to be written, such as "plan"; None: none of ours.

    Raises:
        UsageError: another is there.
    """
    existing_kind = _kind_of(output)
    if existing_kind not in (None, kind):
        raise UsageError(
            f"{option} {output}: a {existing_kind} file of ours is there, and this command would write over "
            "it",
            hint=f"Give {option} another name, or take that file away first.",
        )


def _kind_of(path: Path) -> str | None:
    """Which of our files it is, by its first lines; None where it is none of them, or not there."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            match = _SCHEMA.search(file.read(_HEAD_BYTES))
    except (OSError, RuntimeError):
        return None  # whoever writes it says why it cannot
    return None if match is None else match[1].decode()


def _is_same_file(first: Path, second: Path) -> bool:
    try:
        return first.is_file() and first.samefile(second)
    except (OSError, RuntimeError):
        return False  # missing, or not readable: whoever reads it says so
