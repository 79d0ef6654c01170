"""Carry what Spindle needs beside torch to a GPU machine that reaches no network and has no make.

    python scripts/gpu_wheels.py WHEELS [--python 3.12] [--also NAME[==VERSION] ...]
    python scripts/gpu_wheels.py WHEELS --unpack SITE

The first, here, downloads wheels of constraints.txt's versions for that Python on Linux (x86-64); where
there is none of a version, any version is taken. What such a machine has already (torch, numpy, ...) is left
out. The second, there, lays them into a folder to import from; it needs nothing but Python:

    python3 scripts/gpu_wheels.py WHEELS --unpack SITE && \\
        PYTHONPATH=SITE:src:scripts python3 scripts/gpu_check.py -o OUT
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What an image with torch and transformers does not have, with what these need.
MISSING = (
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "typing_extensions",
    "PuLP",
    "highspy",
    "torchdata",
)
# Of manylinux tags pip takes each as it is said, and no older one with it.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17, 12, 5)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Download or unpack; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path)
    parser.add_argument("--unpack", type=Path, metavar="SITE")
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME[==VERSION]")
    asked = parser.parse_args(arguments)
    if asked.unpack is not None:
        wheels = sorted(asked.wheels.glob("*.whl"))
        for wheel in wheels:
            unpack(wheel, asked.unpack)
        print(f"{asked.unpack}: {len(wheels)} wheels" if wheels else f"{asked.wheels}: there are no wheels")
        return 0 if wheels else 1
    return fetch(asked.wheels, asked.python, asked.also)


def fetch(folder: Path, python: str, also: Sequence[str]) -> int:
    """Have the wheels, and no others, in a folder; the exit code."""
    pinned = pinned_versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    for old in folder.glob("*.whl"):
        old.unlink()
    for wanted in [*(as_pinned(name, pinned) for name in MISSING), *also]:
        name = wanted.partition("==")[0]
        if not any(download(each, python, folder) for each in dict.fromkeys((wanted, name))):
            print(f"gpu-wheels: there is no wheel of {wanted} for Python {python}")
            return 1
    wheels = sorted(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(f"{folder}: {', '.join(wheel.name for wheel in wheels)}; {size:.0f} MiB")
    return 0


def pinned_versions(text: str) -> dict[str, str]:
    """By normal name, the versions of a constraints file."""
    return {normal(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)}


def normal(name: str) -> str:
    """A package's name as all its spellings have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def as_pinned(name: str, pinned: dict[str, str]) -> str:
    """A requirement of the version that is pinned, if one is."""
    version = pinned.get(normal(name))
    return name if version is None else f"{name}=={version}"


def download(wanted: str, python: str, folder: Path) -> bool:
    """Fetch one wheel, without what it needs; whether there is one."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    command += [f"--platform={each}" for each in PLATFORMS]
    done = subprocess.run([*command, wanted], capture_output=True, text=True)
    if done.returncode:
        print(f"{wanted}: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}", file=sys.stderr)
    return done.returncode == 0


def unpack(wheel: Path, folder: Path) -> None:
    """A wheel's modules and metadata; what belongs elsewhere (scripts, headers) is left out."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if ".data/" not in name])


if __name__ == "__main__":
    sys.exit(main())
