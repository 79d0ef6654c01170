"""Values as keys of what has been worked out from them, by which object they are, not by what they hold."""

from __future__ import annotations

from typing import Generic, TypeVar

Value = TypeVar("Value")


class Same(Generic[Value]):
    """A value that never changes as a key: equal to the same object alone, without a look at what it holds.

    Keys keep their values, so no other object gets their place in memory as long as they are in use.
    """

    __slots__ = ("of",)

    def __init__(self, of: Value) -> None:
        self.of = of

    def __hash__(self) -> int:
        return hash(id(self.of))

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Same) and self.of is value.of
