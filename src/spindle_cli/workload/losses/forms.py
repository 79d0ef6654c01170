"""How the values of a share of a batch stand to those of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import fx

from spindle_cli.workload.losses.expressions import Expression


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
