"""How the sequence is shared out in one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Argument = int | str  # of a call: its position, or its keyword
Result = int | None  # of a layer: which of a tuple; None: all that it gives


@dataclass(frozen=True)
class SequenceSplit:
    """A layer whose devices hold a part of the sequence each of what flows between its split parts.

    Names are those inside the task's module.

    Attributes:
        layer: the layer.
        dim: the dimension of that trunk along which positions lie.
        trunk: the layer's argument that is the trunk.
        entries: by module, the arguments that are gathered before it is called: colwise maps, or what lies
            around them.
        alike: colwise maps that take what all devices have whole and alike.
        results: of what the layer gives, what is a part of the sequence.
        partial: parameters that each device uses for its own positions: gradients are to be summed.
        taken: the op's argument (fields, then inputs) that goes into the layer alone, as its trunk; None:
            something is done with it before.
        kept: of `results`, what the op hands on as it is, and nothing else looks at.
    """

    layer: str
    dim: int
    trunk: Argument
    entries: Mapping[str, tuple[Argument, ...]]
    alike: frozenset[str]
    results: tuple[Result, ...]
    partial: frozenset[str]
    taken: int | None
    kept: frozenset[Result]
