"""How the experts of one layer are shared out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from spindle_cli.operators.sequence.types import Argument, Result


@dataclass(frozen=True)
class ExpertSplit:
    """A layer that each device of a group runs on its own samples, and its experts on the samples of all.

    Names are those inside the task's module.

    Attributes:
        layer: the layer.
        modules: of it, with the number of experts that each holds.
        arguments: of the layer's arguments that have an entry for each sample, the dimension of these.
        shared: other arguments that a gradient flows back to: each device finds that of its samples.
        results: of what the layer gives, the dimension of samples.
        taken: the op's arguments (fields, then inputs) that go into the layer alone, with the dimension of
            samples.
        kept: of `results`, what the op hands on as it is, and nothing else looks at.
    """

    layer: str
    modules: Mapping[str, int]
    arguments: Mapping[Argument, int]
    shared: tuple[Argument, ...]
    results: Mapping[Result, int]
    taken: Mapping[int, int]
    kept: frozenset[Result]

    def joined(self) -> ExpertSplit:
        """This split, of an op that takes and gives all samples."""
        return replace(self, taken={}, kept=frozenset())


def expert_sizes(count: int, degree: int) -> tuple[int, ...]:
    """How many of `count` experts each device has: consecutive ones, cut as parameters are."""
    return tuple(
        last - first for first, last in pairwise(count * rank // degree for rank in range(degree + 1))
    )
