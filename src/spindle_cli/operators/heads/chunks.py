"""Run the widest part of a loss chunk by chunk: forward and backward at once, so that no chunk's values
stay.

Each chunk's gradients are taken as soon as its part of the loss is there, and only those of the inputs and
the sums of those of the parameters are kept; the backward pass scales them by the gradient of the loss. As in
Liger-Kernel's fused linear cross entropy (Hsu et al., arXiv 2410.10989, section 3.2), for any part that is a
sum or a mean over its rows.

In float16 gradients vanish or overflow by what the loss is scaled by, which the backward pass alone knows:
there they are taken in it, and the chunks run forward twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from spindle_cli.analysis.autograd import SavedTensorsHooks
from spindle_cli.operators.heads.cuts import Cut, Cuts
from spindle_cli.operators.tensor_group import applied
from spindle_cli.training.precision import gradient_dtype

Range = tuple[int, int]
Repeated = Callable[[int], AbstractContextManager[None]]


@dataclass(frozen=True)
class Chunk:
    """Rows [first, last), and of one row positions [first, last); None: all of them."""

    rows: Range
    positions: Range | None = None

    @property
    def size(self) -> tuple[int, int]:
        """How many rows a chunk has, and positions of each row; 0: all of them."""
        first, last = self.positions or (0, 0)
        return self.rows[1] - self.rows[0], last - first


def choose_chunks(elements: int, rows: int, positions: int | None, limit: int) -> tuple[Chunk, ...]:
    """Chunks of at most `limit` elements of the widest value, as far as it can be cut, about equally large.

    Args:
        elements: of the widest value, for all rows.
        rows, positions: how many there are; None: a row is not cut.
    """
    row = elements // rows
    if row <= limit or positions is None:
        return tuple(Chunk(part) for part in _ranges(rows, max(1, limit // max(row, 1))))
    parts = _ranges(positions, max(1, limit // max(1, row // positions)))
    return tuple(Chunk((index, index + 1), part) for index in range(rows) for part in parts)


def _ranges(size: int, most: int) -> list[Range]:
    count = -(-size // most)
    return [(size * index // count, size * (index + 1) // count) for index in range(count)]


class InChunks:
    """A region as a function of its inputs and of the tensors that its modules hold, for an op's graph."""

    def __init__(
        self, region: fx.GraphModule, held: Sequence[str], cuts: Cuts, elements: int, limit: int
    ) -> None:
        """
        Args:
            region: takes the inputs in order; its own tensors are not used.
            held: names in it of the tensors that it is given after its inputs.
            elements: of its widest value, for all rows that `cuts` were found with; `limit`: for a chunk.
        """
        self._region = region
        self._held = tuple(held)
        self._num_inputs = len(region.graph.find_nodes(op="placeholder"))
        self._cuts = cuts
        self._row = elements // cuts.rows.size
        self._limit = limit
        self.is_values_only = False
        self.is_later = False
        self._repeated: Repeated | None = None
        # torch.fx writes a call under these names.
        self.__name__ = "loss_in_chunks"
        self.__module__ = __name__
        self.__qualname__ = f"{self.__name__}_{id(self)}"

    def __call__(self, *values: Any) -> Tensor:
        """Compute the region's scalar.

        Args:
            values: its inputs, then the tensors that it holds.
        """
        if torch.is_grad_enabled() and any(_needs_gradient(value) for value in values):
            return applied(_Chunked, self, *values)
        return self.run(values)

    @contextmanager
    def values_only(self) -> Iterator[None]:
        """Inside no gradients are taken: the same is run again before they are needed."""
        self.is_values_only = True
        try:
            yield
        finally:
            self.is_values_only = False

    @contextmanager
    def gradients_later(self) -> Iterator[None]:
        """Inside gradients are left to the backward pass, as in float16, whatever the values' numbers are."""
        self.is_later = True
        try:
            yield
        finally:
            self.is_later = False

    @contextmanager
    def sampled(self, repeated: Repeated) -> Iterator[None]:
        """Inside, of the chunks of one size the first alone is run, in the context `repeated(how many)`: on
        tensors without data, where the others do the same. The very first chunk is run by itself.
        """
        self._repeated = repeated
        try:
            yield
        finally:
            self._repeated = None

    def chunks(self, values: Sequence[Any]) -> tuple[Chunk, ...]:
        """The chunks that a run is cut into."""
        rows = self._num_rows(values)
        positions = None if self._cuts.positions is None else self._cuts.positions.size
        return choose_chunks(self._row * rows, rows, positions, self._limit)

    def run(self, values: Sequence[Any]) -> Tensor:
        """Compute the scalar without gradients."""
        with torch.no_grad():
            return _sum(
                self._part([self._cut(*item, chunk) for item in enumerate(values)], chunk, values)
                for chunk in self._run_chunks(values)
            )

    def run_with_gradients(
        self, values: Sequence[Any], needed: Sequence[bool], seed: Tensor | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The scalar, and by position the gradients of the values that need one. `seed`: the gradient of the
        scalar; None: 1.
        """
        rows = self._cuts.rows.inputs
        wanted = _first_positions(values, needed)
        whole = {position: _leaf(values[position]) for position in wanted if position not in rows}
        sums: dict[int, Tensor] = {}

        def one(chunk: Chunk) -> Tensor:  # all of a chunk is gone when it returns
            cut = [self._cut(*item, chunk) for item in enumerate(values)]
            leaves = {p: whole[p] if p in whole else _leaf(cut[p]) for p in wanted}
            by_id = {id(values[position]): leaf for position, leaf in leaves.items()}
            given = [by_id.get(id(value), part) for value, part in zip(values, cut, strict=True)]
            part = self._part(given, chunk, values)
            for position, gradient in _gradients(part, leaves, seed):
                if position in whole:
                    _add(sums, position, gradient, values[position])
                else:
                    if position not in sums:
                        sums[position] = _empty_like(values[position])
                    self._cut(position, sums[position], chunk).copy_(gradient)
            return part.detach()

        # What autograd saves in here is used in here: hooks of whoever is outside have nothing to see.
        with torch.enable_grad(), SavedTensorsHooks(_same, _same):
            loss = _sum(map(one, self._run_chunks(values)))
        return loss, {position: total.to(_dtype(values[position])) for position, total in sums.items()}

    def _run_chunks(self, values: Sequence[Any]) -> Iterator[Chunk]:
        first, *others = self.chunks(values)
        yield first
        if self._repeated is None:
            yield from others
            return
        kinds: dict[tuple[int, int], list[Chunk]] = {}
        for chunk in others:
            kinds.setdefault(chunk.size, []).append(chunk)
        for alike in kinds.values():
            with self._repeated(len(alike)):
                yield alike[0]

    def _cut(self, position: int, value: Any, chunk: Chunk) -> Any:
        """What a chunk takes of a value: a view of it."""
        for cut, part in ((self._cuts.rows, chunk.rows), (self._cuts.positions, chunk.positions)):
            if cut is not None and part is not None and position in cut.inputs:
                along = cut.inputs[position]
                value = value.narrow(along.dim, part[0] * along.width, (part[1] - part[0]) * along.width)
        return value

    def _part(self, given: Sequence[Any], chunk: Chunk, values: Sequence[Any]) -> Tensor:
        """Compute what one chunk adds to the scalar."""
        held = dict(zip(self._held, given[self._num_inputs :], strict=True))
        inputs = tuple(given[: self._num_inputs])
        part: Tensor = functional_call(self._region, held, inputs, tie_weights=False)
        weight = _weight(self._cuts.rows, chunk.rows, self._num_rows(values))
        if self._cuts.positions is not None and chunk.positions is not None:
            weight *= _weight(self._cuts.positions, chunk.positions, self._cuts.positions.size)
        return part if weight == 1.0 else part * weight

    def _num_rows(self, values: Sequence[Any]) -> int:
        position, along = next(iter(self._cuts.rows.inputs.items()))
        return int(values[position].shape[along.dim]) // along.width


def _weight(cut: Cut, part: Range, size: int) -> float:
    return (part[1] - part[0]) / size if cut.is_mean else 1.0


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _first_positions(values: Sequence[Any], needed: Sequence[bool]) -> list[int]:
    """The positions of values that need a gradient, each value once."""
    first = {id(value): position for position, value in reversed(list(enumerate(values)))}
    return sorted(first[id(value)] for value, need in zip(values, needed, strict=True) if need)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _gradients(part: Tensor, leaves: dict[int, Tensor], seed: Tensor | None) -> Iterable[tuple[int, Tensor]]:
    """The gradients of leaves, by position; one that the part does not depend on has zeros."""
    begin = None if seed is None else seed.to(part.dtype)
    grads = torch.autograd.grad(part, list(leaves.values()), begin, allow_unused=True, materialize_grads=True)
    return zip(leaves, grads, strict=True)


def _add(sums: dict[int, Tensor], position: int, gradient: Tensor, value: Tensor) -> None:
    """Add to a parameter's: in at least float32, as one pass over all rows adds up inside of its kernels."""
    if position in sums:
        sums[position] += gradient
    else:
        sums[position] = gradient.to(torch.promote_types(value.dtype, torch.float32))


def _dtype(value: Tensor) -> torch.dtype:
    """The type of a value's gradient."""
    return gradient_dtype(value) if value.is_leaf else value.dtype


def _sum(parts: Iterable[Tensor]) -> Tensor:
    """Adds tensors up in at least float32, and gives the sum in their own dtype."""
    total: Tensor | None = None
    for part in parts:
        dtype, wide = part.dtype, part.to(torch.promote_types(part.dtype, torch.float32))
        total = wide if total is None else total + wide
    assert total is not None, "a share has rows"
    return total.to(dtype)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class _Later:
    """Values of which gradients are taken in the backward pass, but for the tensors among them.

    Attributes:
        others: the values; None in the place of a tensor.
        place: of each tensor, by its position, which one it is of those that are saved, each once.
        autocast: the device type and the dtype of the autocast that is on; None: it is off.
    """

    others: tuple[Any, ...]
    place: dict[int, int]
    autocast: tuple[str, torch.dtype] | None

    @classmethod
    def of(cls, values: Sequence[Any]) -> tuple[_Later, list[Tensor]]:
        """Takes values apart into what is kept here and the tensors that are to be saved."""
        tensors = {id(value): value for value in values if isinstance(value, Tensor)}
        places = {key: place for place, key in enumerate(tensors)}
        saved = list(tensors.values())
        place = {p: places[id(value)] for p, value in enumerate(values) if isinstance(value, Tensor)}
        others = tuple(None if isinstance(value, Tensor) else value for value in values)
        return cls(others, place, _autocast_on(saved[0].device.type)), saved

    def values(self, saved: Sequence[Tensor]) -> list[Any]:
        """Return all values, the saved tensors in their places."""
        all_values = list(self.others)
        for position, place in self.place.items():
            all_values[position] = saved[place]
        return all_values

    def computing(self) -> AbstractContextManager[object]:
        """Enter autocast as it was set when the values were computed."""
        return nullcontext() if self.autocast is None else torch.autocast(*self.autocast)


def _autocast_on(device_type: str) -> tuple[str, torch.dtype] | None:
    if not torch.is_autocast_enabled(device_type):
        return None
    return device_type, torch.get_autocast_dtype(device_type)


def _is_in_float16(values: Sequence[Any]) -> bool:
    """Whether any gradient may be float16."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    autocast = _autocast_on(tensors[0].device.type)
    return (autocast is not None and autocast[1] is torch.float16) or torch.float16 in {
        t.dtype for t in tensors
    }


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunks: InChunks, *values: Any) -> Tensor:
        needed = ctx.needs_input_grad[1:]
        ctx.count = len(values)
        ctx.later = None
        if chunks.is_later or _is_in_float16(values):
            total = chunks.run(values)
            ctx.chunks, ctx.needed = chunks, needed
            ctx.later, saved = _Later.of(values)
            ctx.save_for_backward(*saved)
            return total
        if chunks.is_values_only:
            ctx.positions = _first_positions(values, needed)
            # In the place of gradients: as many tensors, as large, without memory.
            total = chunks.run(values)
            saved = [
                torch.zeros((), dtype=_dtype(values[p]), device=total.device).expand(values[p].shape)
                for p in ctx.positions
            ]
        else:
            total, gradients = chunks.run_with_gradients(values, needed)
            ctx.positions, saved = list(gradients), list(gradients.values())
        ctx.save_for_backward(*saved)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * ctx.count
        if ctx.later is not None:
            with ctx.later.computing():
                values = ctx.later.values(ctx.saved_tensors)
                _, later = ctx.chunks.run_with_gradients(values, ctx.needed, gradients[0])
            for position, gradient in later.items():
                grads[position] = gradient
            return (None, *grads)
        for position, saved in zip(ctx.positions, ctx.saved_tensors, strict=True):
            # In place: nobody else has them, and a second backward pass is refused by their version.
            grads[position] = saved.mul_(gradients[0].to(saved.dtype))
        return (None, *grads)
