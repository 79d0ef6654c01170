"""Patterns of tensors' names. No torch.

A glob, in which `*` stands for any text, dots included; or, where it begins with `^`, a regular expression of
Python's. Either is of the whole name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from spindle_cli.files.parsing import shown

STAR = "*"
_REGULAR = "^"


@dataclass(frozen=True)
class Pattern:
    """A pattern of names."""

    text: str

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        if self.text.startswith(_REGULAR):
            return re.compile(self.text)
        return re.compile("(.*?)".join(map(re.escape, self.text.split(STAR))), re.DOTALL)

    @property
    def is_regular(self) -> bool:
        """Whether it is a regular expression."""
        return self.text.startswith(_REGULAR)

    def matches(self, name: str) -> bool:
        """Whether it is of this name."""
        return self._compiled.fullmatch(name) is not None

    def renamed(self, name: str, replacement: str) -> str | None:
        """The name that `replacement` makes of this one; None where the pattern is not of it.

        In the replacement of a glob the first `*` is what the glob's first stands for, and so on; in that of
        a regular expression `\\1` is what its first group has found.
        """
        found = self._compiled.fullmatch(name)
        if found is None:
            return None
        if self.is_regular:
            return found.expand(replacement)
        texts = iter(found.groups())
        return "".join(next(texts) if part == STAR else part for part in re.split(r"(\*)", replacement))


def require_pattern(text: str) -> str:
    """A pattern as it is.

    Raises:
        ValueError: it is empty, or a regular expression that Python does not take.
    """
    if not text:
        raise ValueError("expected a pattern of names, such as 'model.*'")
    try:
        Pattern(text).matches("")
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return text


def require_replacement(pattern: str, replacement: str) -> None:
    """Check what names are replaced by.

    Raises:
        ValueError: it asks for more, or less, than the pattern finds.
    """
    if not replacement:
        raise ValueError(f"{shown(pattern)}: expected the name that takes its place; found nothing")
    if not pattern.startswith(_REGULAR):
        stars, found = pattern.count(STAR), replacement.count(STAR)
        if stars != found:
            raise ValueError(f"{shown(pattern)} has {stars} of '*', but {shown(replacement)} has {found}")
        return
    try:
        re.compile(f"(?:{pattern})|").match("").expand(replacement)  # type: ignore[union-attr]
    except (re.error, IndexError) as error:
        raise ValueError(f"{shown(replacement)} does not go with {shown(pattern)}: {error}") from error
