"""Contexts that are entered more than once: torch runs an op again whenever a backward pass needs what it did
not keep, also a pass that the op itself asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any


class EnteredAnew(AbstractContextManager[None]):
    """A context that is made whenever it is entered."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._make())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)
