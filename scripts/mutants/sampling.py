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
    for share, (area, mutants) in zip(shares, of_area.items(), strict=True):
        drawn += draw(mutants, Random(f"{seed}/{area}"))[:share]
    return drawn


def draw(mutants: Sequence[Mutant], random: Random) -> list[Mutant]:
    """One mutant of each place, in random order."""
    places: dict[tuple[str, int, int], list[Mutant]] = {}
    for mutant in mutants:
        places.setdefault((str(mutant.path), mutant.line, mutant.column), []).append(mutant)
    order = list(places.values())
    random.shuffle(order)
    return [random.choice(at_place) for at_place in order]
