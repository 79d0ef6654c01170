"""The message of a checkpoint whose names, shapes or dtypes do not fit a workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher

import torch

from spindle_cli.errors import InputError
from spindle_cli.files.parsing import shown
from spindle_cli.workload.initial.holders import Holders
from spindle_cli.workload.initial.tensor_files import TensorPlace
from spindle_cli.workload.names.init_from import InitFrom

SHOWN = 4  # of each kind
_LIKE_ENOUGH = 0.5
_COMPARED = 40  # names that end alike

Shape = tuple[int, ...]


@dataclass
class Misfits:
    """All that does not fit.

    Attributes:
        left_over: source, name in it, what it maps to, its shape.
        missing: name in the workload and its shape.
        twice: name in the workload, and two tensors (source, name) that map to it.
        shapes, dtypes: name in the workload, what it has, and the tensor.
    """

    left_over: list[tuple[int, str, str | None, Shape]] = field(default_factory=list)
    missing: list[tuple[str, Shape]] = field(default_factory=list)
    twice: list[tuple[str, tuple[int, str], tuple[int, str]]] = field(default_factory=list)
    shapes: list[tuple[str, Shape, TensorPlace]] = field(default_factory=list)
    dtypes: list[tuple[str, torch.dtype, TensorPlace]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.left_over, self.missing, self.twice, self.shapes, self.dtypes))


def refusal(
    misfits: Misfits, init_from: InitFrom, holders: Holders, taken: Mapping[str, TensorPlace]
) -> InputError:
    """The error that says all of it. `taken`: what fits, by the workload's name."""
    free = [name for name, _ in misfits.missing]
    over = [name for _, name, _, _ in misfits.left_over]
    lines = [
        *_kind(
            f"in no file, {len(misfits.missing)} of the workload's {len(holders.tensors)}",
            (f"{name} {list(shape)}{_closest(name, over)}" for name, shape in misfits.missing),
        ),
        *_kind(
            f"left over, as the workload has nothing of that name, {len(misfits.left_over)}",
            (
                f"{_in_source(init_from, index, name)} {list(shape)}{_mapped(name, target)}"
                f"{_closest(target or name, free or list(holders.tensors))}"
                for index, name, target, shape in misfits.left_over
            ),
        ),
        *_kind(
            f"given twice, {len(misfits.twice)}",
            (
                f"{name}: by {_in_source(init_from, *first)} and {_in_source(init_from, *second)}"
                for name, first, second in misfits.twice
            ),
        ),
        *_kind(
            f"of another shape, {len(misfits.shapes)}",
            (
                f"{name} has {list(shape)}; {place.name} in {place.file.name} has {list(place.shape)}"
                for name, shape, place in misfits.shapes
            ),
        ),
        *_kind(
            f"of another dtype, {len(misfits.dtypes)}",
            (
                f"{name} is {_dtype(dtype)}; {place.name} in {place.file.name} is {_dtype(place.dtype)}"
                for name, dtype, place in misfits.dtypes
            ),
        ),
    ]
    head = f"{init_from.file}: init_from does not fit the workload ({len(taken)} tensors have a place):"
    return InputError("\n  ".join((head, *lines)), hint=_way_out(misfits))


def _kind(what: str, each: Iterable[str]) -> Iterator[str]:
    lines = list(each)
    if lines:
        yield f"{what}:"
        yield from (f"  {line}" for line in lines[:SHOWN])
        if len(lines) > SHOWN:
            yield f"  and {len(lines) - SHOWN} more"


def _in_source(init_from: InitFrom, index: int, name: str) -> str:
    return f"{shown(name)} of {init_from.sources[index].path}"


def _mapped(name: str, target: str | None) -> str:
    if target is None:
        return ", which no rule of `names` matches"
    return "" if target == name else f", mapped to {shown(target)}"


def _closest(name: str, others: list[str]) -> str:
    """The name that is most like this one, for people; nothing where none is."""
    parts = name.split(".")

    def same_end(other: str) -> int:
        pairs = zip(reversed(parts), reversed(other.split(".")), strict=False)
        return next((count for count, (ours, theirs) in enumerate(pairs) if ours != theirs), len(parts))

    candidates = sorted(others, key=same_end, reverse=True)[:_COMPARED]
    likeness = {other: SequenceMatcher(None, name, other, autojunk=False).ratio() for other in candidates}
    best = max(likeness, key=lambda other: (same_end(other) > 0, likeness[other]), default=None)
    return "" if best is None or likeness[best] < _LIKE_ENOUGH else f"; closest: {shown(best)}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _way_out(misfits: Misfits) -> str:
    ways = []
    if misfits.missing or misfits.left_over:
        ways.append("map names with `names: {pattern: name}`")
    if misfits.missing:
        ways.append("let what is new keep its values from build with `missing: [pattern]`")
    if misfits.left_over or misfits.twice:
        ways.append("leave out of a file with `skip: [pattern]`")
    if misfits.shapes:
        ways.append(
            "a shape has to be the workload's: to begin such a part anew, `skip` the tensor in the file "
            "and list the part under `missing`"
        )
    if misfits.dtypes:
        ways.append("round to fewer bits with `round: true`; other dtypes have to be the same")
    text = "; ".join(ways)
    return f"{text[0].upper()}{text[1:]}."
