"""Weights of tasks' losses that change from step to step, as a workload file says them. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from spindle_cli.workload.settings.optimizers import ImportPath

# [[step, weight], ...], steps counted from 0.
Points = tuple[tuple[Annotated[int, Field(ge=0)], float], ...]


def _ascending(points: Points) -> Points:
    steps = [step for step, _ in points]
    if steps != sorted(set(steps)):
        raise ValueError(f"expected [step, weight] by ascending step, each step once; found steps {steps}")
    return points


def _listed(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise ValueError("expected [[step, weight], ...]")
    return value


WeightPoints = Annotated[Points, Field(min_length=1), AfterValidator(_ascending), BeforeValidator(_listed)]
_PATH, _POINTS = "<path>", "<points>"


def _kind(asked: object) -> str:
    """Which of the two is meant, so that a mistake in one is not also told as one in the other."""
    return _PATH if isinstance(asked, str) else _POINTS


# By task; or the import path of function(step) -> {task: weight}.
TaskWeightSettings = Annotated[
    Annotated[ImportPath, Tag(_PATH)] | Annotated[Mapping[str, WeightPoints], Tag(_POINTS)],
    Discriminator(_kind),
]


def between(points: Sequence[tuple[int, float]], step: int) -> float:
    """The weight at a step: linear between two points, and beyond the first and the last as there."""
    first, last = points[0], points[-1]
    if step <= first[0]:
        return first[1]
    for (low, before), (high, after) in itertools.pairwise(points):
        if step <= high:
            share = (step - low) / (high - low)
            return before + share * (after - before)
    return last[1]
