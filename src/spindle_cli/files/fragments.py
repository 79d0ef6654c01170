"""Names of tensors in files, and of fragments of them: under tensor parallelism a worker has a fragment.

`<name>` is all of a tensor, `<name>@<dimension>:<first>-<last>` the part [first, last) of one dimension.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_KEY = re.compile(r"(?P<name>.*)@(?P<dim>\d+):(?P<first>\d+)-(?P<last>\d+)", re.DOTALL)


@dataclass(frozen=True, order=True)
class Fragment:
    """[first, last) of dimension `dim` of a tensor, and all of its other dimensions."""

    dim: int
    first: int
    last: int


def fragment_key(name: str, fragment: Fragment | None) -> str:
    """The key of a fragment of the tensor `name`; None: of all of it."""
    return name if fragment is None else f"{name}@{fragment.dim}:{fragment.first}-{fragment.last}"


def parse_key(key: str) -> tuple[str, Fragment | None]:
    """What `fragment_key` was made of."""
    found = _KEY.fullmatch(key)
    if found is None:
        return key, None
    dim, first, last = (int(found[group]) for group in ("dim", "first", "last"))
    return found["name"], Fragment(dim, first, last)


def fragments_by_name(keys: Iterable[str]) -> dict[str, list[Fragment | None]]:
    """The fragments of every tensor that some keys stand for, each once, in order."""
    found: dict[str, dict[Fragment | None, None]] = {}
    for key in keys:
        name, fragment = parse_key(key)
        found.setdefault(name, {})[fragment] = None
    return {name: in_order(list(fragments)) for name, fragments in found.items()}


def in_order(fragments: Sequence[Fragment | None]) -> list[Fragment | None]:
    """Whole tensors first, then by where they begin."""
    return sorted(fragments, key=lambda each: (each is not None, each or Fragment(0, 0, 0)))
