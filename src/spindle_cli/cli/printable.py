"""Text for a terminal: what the user's files have in their names must not steer it."""

from __future__ import annotations

import re

# The control characters of ASCII and Latin-1 but tab and line feed, what turns the direction of writing, and
# halves of characters.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Write what would steer a terminal in a text as Python writes it: an escape character as `\x1b`."""
    return _STEERING.sub(lambda match: ascii(match[0])[1:-1], text)
