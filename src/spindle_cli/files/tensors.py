"""How files name tensors, parts of them, and the types of their elements, in the one notation that all use.

`<name>` is all of a tensor, `<name>[<range>,...]` a part: one range for each dimension, from the first to the
last that is cut, `first:last` (half-open) or `:` for all of it. A *fragment*, what a worker has under tensor
parallelism, is cut along one dimension only; a checkpoint's regions (checkpoint/index.py) along any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


_KEY = re.compile(r"(?P<name>.*)\[(?P<ranges>(?:\d+)?:(?:\d+)?(?:,(?:\d+)?:(?:\d+)?)*)\]", re.DOTALL)
_RANGE = re.compile(r"(\d+):(\d+)")

Range = tuple[int, int] | None  # [first, last) of a dimension; None: all of it
# torch's name -> the name in safetensors files, and the bytes of an element
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


def part_key(name: str, ranges: Sequence[Range]) -> str:
    """The key of the part of the tensor `name` that lies in these ranges of its first dimensions."""
    texts = [":" if bounds is None else f"{bounds[0]}:{bounds[1]}" for bounds in ranges]
    return f"{name}[{','.join(texts)}]"


def parse_part_key(key: str) -> tuple[str, tuple[Range, ...] | None]:
    """What `part_key` was made of; None for the name of a whole tensor."""
    match = _KEY.fullmatch(key)
    if match is None:
        return key, None
    ranges: list[Range] = []
    for text in match["ranges"].split(","):
        ends = _RANGE.fullmatch(text)
        if ends is None and text != ":":
            return key, None
        ranges.append(None if ends is None else (int(ends[1]), int(ends[2])))
    return match["name"], tuple(ranges)


@dataclass(frozen=True, order=True)
class Fragment:
    """[first, last) of dimension `dim` of a tensor, and all of its other dimensions."""

    dim: int
    first: int
    last: int


def fragment_key(name: str, fragment: Fragment | None) -> str:
    """The key of a fragment of the tensor `name`; None: of all of it."""
    if fragment is None:
        return name
    return part_key(name, (*(None,) * fragment.dim, (fragment.first, fragment.last)))


def parse_key(key: str) -> tuple[str, Fragment | None]:
    """Return what `fragment_key` was made of."""
    name, ranges = parse_part_key(key)
    if ranges is None:
        return key, None
    *whole, cut = ranges
    assert cut is not None and not any(whole), f"{key!r} is no fragment"
    return name, Fragment(len(whole), *cut)


def fragments_by_name(keys: Iterable[str]) -> dict[str, list[Fragment | None]]:
    """The fragments of every tensor that some keys stand for, each once, in order."""
    by_name: dict[str, dict[Fragment | None, None]] = {}
    for key in keys:
        name, fragment = parse_key(key)
        by_name.setdefault(name, {})[fragment] = None
    return {name: in_order(list(fragments)) for name, fragments in by_name.items()}


def in_order(fragments: Sequence[Fragment | None]) -> list[Fragment | None]:
    """Whole tensors first, then by where they begin."""
    return sorted(fragments, key=lambda fragment: (fragment is not None, fragment or Fragment(0, 0, 0)))


def joined(fragments: Mapping[Fragment | None, Tensor]) -> Tensor:
    """A tensor from its fragments, which lie side by side along one dimension; None: the tensor itself."""
    ordered = in_order(list(fragments))
    first = ordered[0]
    if first is None or len(ordered) == 1:
        return fragments[first]
    import torch  # not above: nothing else here, and nobody who plans, needs it

    return torch.cat([fragments[fragment] for fragment in ordered], first.dim)
