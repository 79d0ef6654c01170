"""What code reads is followed through all that Python wraps functions in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from spindle_cli.workload.introspection import Reads


def called(bound: int = 0) -> int:
    return read_by_it + bound


read_by_it = 1


class Held:
    here = staticmethod(called)
    lazily = functools.cached_property(called)
    by_name = property(called)


WRAPPERS: dict[str, Callable[[], Any]] = {
    "a function": lambda: called,
    "a method": lambda: called.__get__(Held()),
    "a static method": lambda: vars(Held)["here"],
    "a property": lambda: Held.by_name,
    "a cached property": lambda: vars(Held)["lazily"],
    "a partial": lambda: functools.partial(called, 1),
    "an argument of a partial": lambda: functools.partial(max, key=called),
    "what remembers its calls": lambda: functools.lru_cache(called),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_function_is_found_in_what_wraps_it(wrapper: str) -> None:
    reads = Reads(follows=lambda held: getattr(held, "__module__", None) == __name__)
    reads.of_function(WRAPPERS[wrapper]())
    reads.finish()
    assert called.__code__ in reads.codes
    assert "read_by_it" in reads.names


def test_nothing_is_found_in_a_value() -> None:
    reads = Reads(follows=lambda held: getattr(held, "__module__", None) == __name__)
    reads.of_function(max)  # type: ignore[arg-type]
    reads.finish()
    assert not reads.codes
