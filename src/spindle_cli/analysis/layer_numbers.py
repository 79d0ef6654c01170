"""Layers that differ in their number alone, as `layer_idx` of Hugging Face's: what is found of one holds for
the others where its forward does not look at the number.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

T = TypeVar("T")

# Attributes that only say which layer it is.
_NUMBER = re.compile(r"(^|_)(idx|index|id|number)$")


def is_number(attribute: str) -> bool:
    """Whether an attribute of this name only says which layer it is."""
    return bool(_NUMBER.search(attribute))


class Findings(Generic[T]):
    """What was found of calls, equal ones once. `known`: by a text that says all about a call."""

    def __init__(self, told: Callable[[str], T | None]) -> None:
        """`told`: what another process has found of a call, by that text; None if it says nothing."""
        self.known: dict[str, T] = {}
        self._told = told

    def of(
        self,
        texts: tuple[str, str],
        module: nn.Module | None,
        find: Callable[[], T],
        holds: Callable[[T], bool] = lambda _: True,
    ) -> T:
        """Look up what was found of a call, or find it.

        Args:
            texts: that say all about it, but the numbers of its layers; and these too.
            module: that is called, if one is.
            find: finds it.
            holds: whether what was found without a look at a number is so; otherwise it is found again.
        """
        for text in dict.fromkeys(texts):
            if text not in self.known and (told := self._told(text)) is not None:
                self.known[text] = told
            if text in self.known:
                return self.known[text]
        if module is not None and texts[0] != texts[1]:
            with contextlib.suppress(Exception), _noticing(module) as noticed:
                finding = find()
                if not noticed.looked and holds(finding):
                    self.known[texts[0]] = finding
                    return finding
        self.known[texts[1]] = find()
        return self.known[texts[1]]


@dataclass
class _Noticed:
    looked: bool = False


class _Number:
    """In the place of an attribute, on the class: says when somebody looks at it, or changes it."""

    def __init__(self, name: str, noticed: _Noticed) -> None:
        self.name = name
        self.values: dict[int, Any] = {}  # by id of the module
        self._noticed = noticed

    def __get__(self, instance: Any, _: type | None = None) -> Any:
        self._noticed.looked = True
        if id(instance) in self.values:
            return self.values[id(instance)]
        held = {} if instance is None else instance.__dict__
        if self.name not in held:
            raise AttributeError(self.name)
        return held[self.name]

    def __set__(self, instance: Any, value: Any) -> None:
        self._noticed.looked = True
        instance.__dict__[self.name] = value

    def __delete__(self, instance: Any) -> None:
        self._noticed.looked = True
        instance.__dict__.pop(self.name, None)


@contextlib.contextmanager
def _noticing(root: nn.Module) -> Iterator[_Noticed]:
    """Notice inside whether the numbers of a module and its parts are looked at; they are not among what the
    instances hold meanwhile.
    """
    noticed = _Noticed()
    with contextlib.ExitStack() as stack:
        placed: dict[tuple[type, str], _Number] = {}
        for part in root.modules():
            for name in [
                name for name, value in part.__dict__.items() if type(value) is int and is_number(name)
            ]:
                key = (type(part), name)
                if key not in placed:
                    placed[key] = _Number(name, noticed)
                    stack.enter_context(_on_class(*key, placed[key]))
                placed[key].values[id(part)] = part.__dict__.pop(name)
                stack.callback(part.__dict__.__setitem__, name, placed[key].values[id(part)])
        yield noticed


@contextlib.contextmanager
def _on_class(owner: type, name: str, value: Any) -> Iterator[None]:
    absent = object()
    before = owner.__dict__.get(name, absent)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is absent:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
