"""How the values of a share of a batch stand to those of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import fx

from spindle_cli.analysis.losses.expressions import Expression


class Kind(Enum):
    """How a value in a share stands to the whole batch's.

    ROWS: it has the rows of the share's samples, as they are in the whole batch's.
    EQUAL: it is the whole batch's.
    PART: the shares' values add up to the whole batch's.
    """

    ROWS = "rows"
    EQUAL = "equal"
    PART = "part"


@dataclass(frozen=True, eq=False)
class Form:
    """A value of a share of the loss.

    Attributes:
        degree: how the whole batch's value grows with the number of samples: 0 for a mean, 1 for a sum; None:
            in another way.
        expression: what computes it; constants and structures of them stand for themselves.
    """

    kind: Kind
    degree: int | None
    expression: Expression | Any


class NotKnownError(Exception):
    """A loss is not known to be a sum or mean over what counts."""

    def __init__(self, why: str, node: fx.Node) -> None:
        super().__init__(why)
        place = node.meta.get("place")
        self.reason = why if place is None else f"{why} ({place})"


def plus(first: int | None, second: int | None, sign: int = 1) -> int | None:
    """The degree of a product, or with sign -1 of a quotient."""
    return None if first is None or second is None else first + sign * second


def highest(degrees: set[int | None]) -> int | None:
    """The degree of a sum of values that all shares know."""
    known_degrees = [degree for degree in degrees if degree is not None]
    return max(known_degrees, default=0) if len(known_degrees) == len(degrees) else None


def most(kinds: set[Kind]) -> Kind:
    """The kind of a value that is made of values of these kinds."""
    return next(kind for kind in (Kind.PART, Kind.ROWS, Kind.EQUAL) if kind in kinds)


def is_zero(form: Form) -> bool:
    """Whether it is the constant zero, which grows with the batch in any way."""
    return isinstance(form.expression, int | float) and form.expression == 0
