"""What one share of a contrastive loss runs: a list of actions on tensors in one of few forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

OWN = -1  # the share's rows, or all of what has no samples
SHIFTED = -2  # the share's own numbers, counted from the batch's first sample
ALL = -3  # the rows of all shares
PARTED = -4  # of what every share has alike, the part of one
Key = tuple[int, int]  # a tensor's number, and in what form: one of these, or the dimension that is cut


@dataclass(frozen=True)
class Slot:
    """In the place of a tensor among an operator's arguments."""

    key: Key


@dataclass(frozen=True)
class Grows:
    """In the place of a number that is `fixed + slope * samples of the share`."""

    fixed: int
    slope: int


@dataclass(frozen=True)
class Run:
    """Run an operator.

    `scaled`: by the share's part of the batch, as it gives a mean. `results`: keys of what it gives, None for
    what nobody needs.
    """

    func: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: tuple[Key | None, ...]
    grad: bool
    scaled: bool = False


@dataclass(frozen=True)
class Gather:
    """Gather the rows of all shares, which lie along `dim`."""

    source: Key
    result: Key
    dim: int


@dataclass(frozen=True)
class Number:
    """Count samples by `step` from the batch's first one along `dim`: the share's own, or those of all."""

    source: Key
    result: Key
    dim: int
    step: int
    of_all: bool


@dataclass(frozen=True)
class Share:
    """Takes of what every share has alike as much as the share has of the batch."""

    source: Key
    result: Key


@dataclass(frozen=True)
class Count:
    """How many samples the batch has, on the device of `source`."""

    source: Key
    result: Key


@dataclass(frozen=True)
class Diagonal:
    """Takes of each sample of the share the pair with itself; pairs are cut along `cut` of the dimensions 0,
    1.
    """

    source: Key
    result: Key
    cut: int


@dataclass(frozen=True)
class Eye:
    """1 for each sample's pair with itself, else 0; of two dimensions, cut along `cut`."""

    result: Key
    cut: int
    named: dict[str, Any]


Action = Run | Gather | Number | Share | Count | Diagonal | Eye


@dataclass
class Recipe:
    """What a share runs, in order.

    Attributes:
        size: samples of the batch.
        given: keys of the arguments; `held`: by key, names of parameters and buffers; `constants`: by key.
        loss: key of the result.
        ended: by action, the keys of which it is the last user.
    """

    size: int
    given: tuple[Key, ...]
    held: dict[Key, str]
    constants: dict[Key, Tensor]
    loss: Key
    actions: tuple[Action, ...]
    ended: tuple[tuple[Key, ...], ...] = field(default=())


def filled(
    action: Run, tensor: Callable[[Slot], Any], number: Callable[[Grows], int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An operator's arguments, with tensors and numbers in their places."""

    def fill(value: Any) -> Any:
        match value:
            case Slot():
                return tensor(value)
            case Grows():
                return number(value)
            case list():
                return [fill(item) for item in value]
        return value

    return tuple(fill(v) for v in action.arguments), {n: fill(v) for n, v in action.named.items()}
