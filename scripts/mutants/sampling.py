"""Which mutants are tried: as many of each area, drawn with a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from mutants.making import Mutant


def sample(of_area: Mapping[str, Sequence[Mutant]], count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants, spread over the areas as evenly as it goes, each area in the order drawn.

    An area's places are drawn first, then one of the bugs at each place: a line with many operators counts
    as one that has a single. What is drawn of an area does not depend on the others, and a larger count draws
    the same first.
    """
    shares = [count // len(of_area) + (index < count % len(of_area)) for index in range(len(of_area))]
    drawn: list[Mutant] = []
    for share, mutants in zip(shares, of_area.values(), strict=True):
        drawn += draw(mutants, seed)[:share]
    return drawn


def draw(mutants: Sequence[Mutant], seed: int) -> list[Mutant]:
    """One mutant of each place, in random order: by numbers drawn with the seed and the mutant's name, so
    that code that comes or goes elsewhere changes nothing of it.
    """
    places: dict[tuple[str, int, int], list[Mutant]] = {}
    for mutant in mutants:
        places.setdefault((str(mutant.path), mutant.line, mutant.column), []).append(mutant)
    one_each = [min(at_place, key=lambda mutant: _number(mutant, seed)) for at_place in places.values()]
    # A place with many has a low least number more often: it is given another.
    return sorted(one_each, key=lambda mutant: _number(mutant, seed, "place"))


def _number(mutant: Mutant, seed: int, what: str = "bug") -> float:
    return Random(f"{seed}/{what}/{mutant.name}").random()
