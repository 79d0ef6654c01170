"""Mutants that no test can catch, as they change nothing that anybody can see; each with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

PATH = Path("scripts/mutants/excuses.yaml")


@dataclass(frozen=True)
class Excuse:
    """One of them.

    Attributes:
        mutant: its name.
        change: what becomes what, for who reads the file.
        why: the reason why no test can see it.
    """

    mutant: str
    change: str
    why: str


def read_excuses(path: Path) -> dict[str, Excuse]:
    """The excuses of a file, by the mutant's name.

    Raises:
        ValueError: an entry has other keys, an empty value, or a name that stands there already.
    """
    found: dict[str, Excuse] = {}
    for entry in yaml.safe_load(path.read_text()) or []:
        if set(entry) != {"mutant", "change", "why"} or not all(
            str(value).strip() for value in entry.values()
        ):
            raise ValueError(
                f"{path}: an excuse has `mutant`, `change` and `why`, and this one does not: {entry}"
            )
        if entry["mutant"] in found:
            raise ValueError(f"{path}: {entry['mutant']} is excused twice")
        found[entry["mutant"]] = Excuse(**entry)
    return found
