"""The parts of the code that bugs are put into."""

from __future__ import annotations

from pathlib import Path

SOURCE = Path("src/spindle_cli")
# What each area's score is of; `costs` are the formulas and the account that calls them.
AREAS: dict[str, tuple[str, ...]] = {
    "plan": ("plan",),
    "costs": ("account", "costs"),
    "program": ("program",),
    "check": ("check",),
    "simulate": ("simulate",),
    "runtime": ("runtime",),
    "checkpoint": ("checkpoint",),
    "workload": ("workload", "training", "analysis"),
}


def files_of(area: str, root: Path) -> list[Path]:
    """The area's Python files, relative to the root of the tree, in the order of their names."""
    folders = (root / SOURCE / folder for folder in AREAS[area])
    return sorted(path.relative_to(root) for folder in folders for path in folder.rglob("*.py"))


def area_of(path: Path) -> str:
    """The area that a file of the tree belongs to."""
    folder = path.relative_to(SOURCE).parts[0]
    return next(area for area, folders in AREAS.items() if folder in folders)
