"""Copies of the working tree, in which bugs are put; the working tree itself is only read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


class Tree:
    """One copy, held by one process at a time."""

    def __init__(self, root: Path) -> None:
        """Args: root: the copy's folder."""
        self.root = root

    @contextlib.contextmanager
    def changed(self, path: Path, text: str) -> Iterator[None]:
        """Have another text in one file for a while.

        The time of its last change is put back with its text, so that the compiled file beside it is good
        again.
        """
        file = self.root / path
        whole, stat = file.read_bytes(), file.stat()
        file.write_text(text)
        try:
            yield
        finally:
            file.write_bytes(whole)
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@contextlib.contextmanager
def held_tree(folder: Path, source: Path) -> Iterator[Tree]:
    """A copy of `source` as it is now, the first in `folder` that no other process holds."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(100):
        with (folder / f"{number}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            root = folder.resolve() / str(number)
            copy(source, root)
            yield Tree(root)
            return
    raise RuntimeError(f"100 processes hold the copies in {folder}")


def copy(source: Path, root: Path) -> None:
    """Make `root` the same as the files of `source` that git tracks or would; compile what Python runs."""
    wanted = set(_files(source))
    if root.exists():
        for path in root.rglob("*"):
            relative = path.relative_to(root)
            if path.is_file() and "__pycache__" not in relative.parts and relative not in wanted:
                path.unlink()
    for relative in wanted:
        file, other = source / relative, root / relative
        if other.exists() and other.stat().st_mtime_ns == file.stat().st_mtime_ns:
            continue
        other.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, other)
    code = [root / name for name in ("src", "tests", "scripts")]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *code], check=True)


def _files(source: Path) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=source,
        capture_output=True,
        check=True,
    )
    paths = [Path(name.decode()) for name in listed.stdout.split(b"\0") if name]
    return [path for path in paths if (source / path).is_file()]
