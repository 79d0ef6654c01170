"""Along what a loss's widest part may be cut, shown by the rules that also say what may be split over a
batch.

Two ways: rows (samples, or the tokens of all samples where they lie in one dimension), and inside of one row
its positions. Each is shown on the part as it is, with its inputs cut in this way: what it gives then adds up
to what it gives for all of them, or is a mean of equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from spindle_cli.analysis.rules.types import WHOLE, Batch, Mixed, Reduced, State
from spindle_cli.analysis.splitting.examine import Inputs, examine
from spindle_cli.analysis.tracing.observe import Observer
from spindle_cli.operators.heads.region import NotInPartsError, Region

_SIZES = (3, 5)  # to try with: without a common divisor, and none that models have for widths


@dataclass(frozen=True)
class Along:
    """Where a tensor is cut: entries [first * width, last * width) of dimension `dim`."""

    dim: int
    width: int = 1


@dataclass(frozen=True)
class Cut:
    """The inputs of a region that are cut together.

    Attributes:
        size: how many rows or positions there are.
        inputs: by position, along what each is cut.
        is_mean: the parts' results are means, to be weighted by the parts' sizes; else they are added up.
    """

    size: int
    inputs: Mapping[int, Along]
    is_mean: bool


@dataclass(frozen=True)
class Cuts:
    """How a region may be cut; `positions`: inside of one row."""

    rows: Cut
    positions: Cut | None


def find_cuts(
    region: Region,
    module: nn.Module,
    values: Mapping[fx.Node, Any],
    doubled: Mapping[fx.Node, Any],
) -> Cuts:
    """Find along which dimensions of its inputs a region may be cut.

    Args:
        module: the region; takes its inputs in order.
        values, doubled: what the op's nodes give for a share, and for one of twice the size.

    Raises:
        NotInPartsError: not even along its rows.
    """
    given = [values[node] for node in region.inputs]
    along = _rows(given, [doubled[node] for node in region.inputs])
    rows = _cut_along(module, given, along)
    if isinstance(rows, Mixed):
        raise NotInPartsError(f"its rows depend on each other: {rows}")
    return Cuts(rows, _positions(module, given, rows))


def _rows(given: Sequence[Any], doubled: Sequence[Any]) -> dict[int, Along]:
    """The inputs that have the samples' rows, along their first dimension."""
    lengths: dict[int, int] = {}
    for position, (item, twice) in enumerate(zip(given, doubled, strict=True)):
        if not isinstance(item, Tensor):
            if item != twice:
                raise NotInPartsError("it takes a number that grows with the batch")
        elif item.shape != twice.shape:
            if item.dim() != twice.dim() or twice.shape != (2 * item.shape[0], *item.shape[1:]):
                raise NotInPartsError("its inputs do not have their rows along the first dimension")
            lengths[position] = item.shape[0]
    rows = math.gcd(*lengths.values()) if lengths else 0
    if not lengths or rows not in lengths.values():
        raise NotInPartsError("its inputs have no rows in common")
    return {position: Along(0, size // rows) for position, size in lengths.items()}


def _positions(module: nn.Module, given: Sequence[Any], rows: Cut) -> Cut | None:
    """The cut inside of one row: along dimension 1, or 0 of what has several entries for each row."""
    one_row = [
        item.narrow(0, 0, rows.inputs[position].width) if position in rows.inputs else item
        for position, item in enumerate(given)
    ]
    dims = {position: int(along.width == 1) for position, along in rows.inputs.items()}
    lengths = {
        position: one_row[position].shape[dim]
        for position, dim in dims.items()
        if one_row[position].dim() > dim + 1 and one_row[position].is_floating_point()
    }
    if not lengths:
        return None
    length = lengths[max(lengths, key=lambda position: one_row[position].numel())]
    cut = {
        position: Along(dim)
        for position, dim in dims.items()
        if one_row[position].dim() > dim and one_row[position].shape[dim] == length
    }
    inner_cut = _cut_along(module, one_row, cut) if length > 1 else None
    return inner_cut if isinstance(inner_cut, Cut) else None


def _cut_along(module: nn.Module, given: Sequence[Any], along: Mapping[int, Along]) -> Cut | Mixed:
    """The cut of these inputs, or why it is none."""
    first, first_along = next(iter(along.items()))
    size = given[first].shape[first_along.dim] // first_along.width
    sizes = (*_SIZES, size if size > 1 and size not in _SIZES else 7, 1)
    arguments: list[Inputs] = [
        (tuple(_resized(item, along.get(position), count) for position, item in enumerate(given)), {})
        for count in sizes
    ]
    states: list[State] = [
        Batch(along[position].dim, 1, along[position].width) if position in along else WHOLE
        for position, item in enumerate(given)
        if isinstance(item, Tensor)
    ]
    findings = examine(module, arguments, states, sizes, Observer(), module)
    if findings.why_not is not None:
        return findings.why_not
    if findings.results is None:
        return Mixed("it does not run on other numbers of them")
    (state,) = findings.states
    if isinstance(state, Mixed):
        return state
    if not isinstance(state, Reduced) or state.counted or state.degree not in (0, 1):
        return Mixed("what it gives is neither a sum nor a mean of theirs")
    return Cut(size, along, is_mean=state.degree == 0)


def _resized(item: Any, along: Along | None, count: int) -> Any:
    """An input with `count` entries where it is cut, on the meta device; what is no tensor as it is."""
    if not isinstance(item, Tensor):
        return item
    shape = list(item.shape)
    if along is not None:
        shape[along.dim] = count * along.width
    return torch.empty(shape, dtype=item.dtype, device="meta")
