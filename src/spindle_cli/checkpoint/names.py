"""The names of tensors in a checkpoint, and of the boxes of them that its files have. No torch.

They are the keys of a flattened state dict: `model.<name>`, `optimizer.state.<name>.<key>`,
`buffers.<rank>.<name>`, `random.<device type>.<rank>`; `<name>` is the user's own, with the task's in front.

A key in a shard is the tensor's name where it has all of it, and `<name>[first:last,...]`, one range for each
dimension, where it has a part (the notation of files/tensors.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from spindle_cli.files.tensors import Fragment, parse_part_key, part_key

# Of a parameter's optimizer state, the moving average of the weights.
AVERAGE_KEY = "ema"
# Of islands that average now and then alone: their last common point, and the outer optimizer's momentum.
COMMON_KEY, OUTER_MOMENTUM_KEY = "common", "outer_momentum"


def model_key(name: str) -> str:
    """Return the name under which a parameter, by its canonical name, is saved."""
    return f"model.{name}"


def state_key(name: str, key: str) -> str:
    """A parameter's optimizer state by the optimizer's own key."""
    return f"optimizer.state.{name}.{key}"


def optimizer_keys(names: Iterable[str]) -> dict[str, list[str]]:
    """Parameter -> the optimizer's keys, of all the names of a checkpoint."""
    keys: dict[str, list[str]] = {}
    for name in names:
        if name.startswith("optimizer.state."):
            parameter, key = _parameter_and_key(name)
            keys.setdefault(parameter, []).append(key)
    return keys


def buffer_key(name: str, rank: int) -> str:
    """Return the name under which one rank's value of a buffer is saved."""
    return f"buffers.{rank}.{name}"


def random_key(device_type: str, rank: int) -> str:
    """Return the name under which the state of a rank's generator is saved."""
    return f"random.{device_type}.{rank}"


def every_name(names: Iterable[str], aliases: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Every name under which a saved tensor can be asked for -> the one under which it is saved.

    Args:
        names: under which tensors are saved.
        aliases: as in `Checkpoint`.

    Returns:
        Also a buffer's name as part of the model, for the value of the first rank that has one.
    """
    saved_names = {name: name for name in names}
    buffers = sorted(map(_rank_and_buffer, (name for name in saved_names if name.startswith("buffers."))))
    for rank, buffer in buffers:
        saved_names.setdefault(model_key(buffer), buffer_key(buffer, rank))
    for name, saved in list(saved_names.items()):
        kind, _, tensor = name.partition(".")
        if kind == "model":
            saved_names.update((model_key(alias), saved) for alias in aliases.get(tensor, ()))
        elif kind == "optimizer":
            parameter, key = _parameter_and_key(name)
            saved_names.update((state_key(alias, key), saved) for alias in aliases.get(parameter, ()))
    return saved_names


def _rank_and_buffer(name: str) -> tuple[int, str]:
    _, rank, buffer = name.split(".", 2)
    return int(rank), buffer


def _parameter_and_key(name: str) -> tuple[str, str]:
    parameter, _, key = name.removeprefix("optimizer.state.").rpartition(".")
    return parameter, key


def model_names(names: Iterable[str]) -> dict[str, None]:
    """Canonical names of the parameters and buffers among saved tensors."""
    parameters = dict.fromkeys(name.removeprefix("model.") for name in names if name.startswith("model."))
    return parameters | dict.fromkeys(
        _rank_and_buffer(name)[1] for name in names if name.startswith("buffers.")
    )


@dataclass(frozen=True)
class Region:
    """Elements [offset, offset + size) of every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return the region that is all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def of_fragment(cls, shape: Sequence[int], fragment: Fragment | None) -> Region:
        """A fragment of a tensor of this shape; None: all of it."""
        whole = cls.whole(shape)
        if fragment is None:
            return whole
        return whole.within(fragment.dim, fragment.first, fragment.last)

    def within(self, dim: int, first: int, last: int) -> Region:
        """The part [first, last) of one dimension of this region."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += first
        sizes[dim] = last - first
        return Region(tuple(offsets), tuple(sizes))

    def key(self, name: str, shape: Sequence[int]) -> str:
        """This part's key in a shard; the tensor has this name and this shape."""
        if self == Region.whole(shape):
            return name
        ends = zip(self.offsets, self.sizes, strict=True)
        return part_key(name, [(first, first + size) for first, size in ends])

    def of_range(self, first: int, last: int) -> Iterator[Region]:
        """The boxes that elements [first, last) of this region, counted row by row, make up, in their order.

        At most 2 d - 1 for d dimensions: what is left of a row, whole rows, and the beginning of a row.
        """
        if first >= last:
            return
        if not self.sizes:
            yield self
            return
        row = prod(self.sizes[1:])
        head, tail = -(-first // row), last // row  # whole rows are [head, tail)
        if first % row:
            end = min(last, head * row)
            yield from self._of_row(head - 1, first - (head - 1) * row, end - (head - 1) * row)
        if head < tail:
            yield self.within(0, head, tail)
        if last % row and tail >= head:
            yield from self._of_row(tail, 0, last - tail * row)

    def _of_row(self, index: int, first: int, last: int) -> Iterator[Region]:
        inner = Region(self.offsets[1:], self.sizes[1:])
        for rest in inner.of_range(first, last):
            yield Region((self.offsets[0] + index, *rest.offsets), (1, *rest.sizes))


def parse_region(key: str) -> tuple[str, Region] | None:
    """The tensor's name, and which part of it: what `Region.key` made of a part; None for a plain name."""
    name, ranges = parse_part_key(key)
    ends = [bounds for bounds in ranges or () if bounds is not None]
    if not ends or ranges is None or len(ends) < len(ranges):
        return None
    return name, Region(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
