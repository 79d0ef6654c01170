"""What a rank reads of a batch for its slices: together where it hangs together."""

from __future__ import annotations

from dataclasses import dataclass

from spindle_cli.runtime.step.counting import Portion
from spindle_cli.runtime.step.data import portions


@dataclass(frozen=True)
class Named:
    name: str


@dataclass(frozen=True)
class Traced:
    task: Named
    varying: bool = False


@dataclass(frozen=True)
class Wired:
    task: Traced
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Reads:
    """A slice, as far as its reading goes."""

    wired: Wired
    samples: tuple[int, int]


def reads(task: str, first: int, last: int, *fields: str) -> Reads:
    return Reads(Wired(Traced(Named(task)), fields), (first, last))


def test_samples_that_overlap_or_follow_each_other_are_read_together() -> None:
    found = portions([reads("a", 4, 8, "y"), reads("a", 0, 4, "x"), reads("a", 6, 9, "x")])  # type: ignore[list-item]
    assert found == (Portion("a", (0, 9), ("x", "y")),)


def test_samples_with_others_between_them_are_read_apart() -> None:
    """As those of micro-batches, of which the rank has a share each."""
    found = portions([reads("a", 0, 2, "x"), reads("a", 3, 5, "x"), reads("b", 2, 3, "x"), reads("a", 5, 6)])  # type: ignore[list-item]
    assert found == (
        Portion("a", (0, 2), ("x",)),
        Portion("a", (3, 5), ("x",)),
        Portion("b", (2, 3), ("x",)),
    )
