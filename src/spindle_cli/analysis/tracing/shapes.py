"""What is known of a trace's nodes: shapes, dtypes, gradients, and which dimension is the batch.

The trace is run twice (observe.py), with the task's batch size and with twice that: the dimension that
doubles is the batch's.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from spindle_cli.analysis.fixed import is_fixed, one_row
from spindle_cli.workload.graph import ValueSpec
from spindle_cli.workload.refuse import refusal


@dataclass(frozen=True)
class BatchDim:
    """The dimension of a tensor that the batch lies along, `rows` entries per sample.

    `dim` is None where no dimension grows with the batch; `mixes` where the size grows otherwise than by
    whole rows per sample (batch x batch, batch + 1): then the samples depend on each other.
    """

    dim: int | None
    rows: int = 1
    mixes: bool = False


@dataclass(frozen=True)
class Shapes:
    """What each node of a task's trace gives for the whole batch (`values`) and for twice the batch
    (`doubled`).
    """

    batch_size: int
    values: dict[fx.Node, Any]
    doubled: dict[fx.Node, Any]

    def is_tensor(self, node: fx.Node) -> bool:
        """Whether the node gives one tensor."""
        return isinstance(self.values[node], Tensor)

    def holds_tensors(self, node: fx.Node) -> bool:
        """Whether the node gives a tuple, list, dict or object with tensors in it."""
        value = self.values[node]
        return not isinstance(value, Tensor) and any(isinstance(leaf, Tensor) for leaf in leaves_of(value))

    def gives_tensors(self, node: fx.Node) -> bool:
        """Whether the node gives a tensor, or something with tensors in it."""
        return self.is_tensor(node) or self.holds_tensors(node)

    def is_fixed(self, node: fx.Node) -> bool:
        """Whether the values of all tensors that the node gives are known, for any number of samples."""
        leaves = [leaf for leaf in leaves_of(self.values[node]) if isinstance(leaf, Tensor)]
        return bool(leaves) and all(map(is_fixed, leaves))

    def batch_dim(self, node: fx.Node) -> BatchDim:
        """The batch's dimension in what a node gives, one tensor."""
        return self.batch_of(self.values[node], self.doubled[node])

    def from_right(self, node: fx.Node) -> tuple[int, int]:
        """The place of the batch's dimension in what a node gives, counted from the last, and the rows of a
        sample; equal for tensors whose samples meet when they are broadcast.
        """
        batch = self.batch_dim(node)
        assert batch.dim is not None
        return batch.dim - self.values[node].dim(), batch.rows

    def batch_of(self, value: Tensor, doubled: Tensor) -> BatchDim:
        """The batch's dimension in a tensor that is seen for the batch and for twice the batch."""
        return find_batch_dim(value.shape, doubled.shape, self.batch_size)

    def spec(self, node: fx.Node, task: str) -> ValueSpec:
        """The node's tensor as a value between ops.

        Raises:
            WorkloadError: it has several rows per sample along another dimension than the first.
        """
        value, batch = self.values[node], self.batch_dim(node)
        if batch.dim and batch.rows > 1:
            raise refusal(
                task,
                f"{node.name!r} of shape {tuple(value.shape)} has {batch.rows} "
                f"rows per sample along dimension {batch.dim}",
                node.meta.get("place"),
                "Several rows per sample can be split only along dimension 0; reshape to (batch, rows, ...).",
            )
        dim = None if batch.mixes else batch.dim
        row = one_row(value) if node.op == "placeholder" else None
        return ValueSpec(
            node.name, tuple(value.shape), value.dtype, dim, batch.rows, value.requires_grad, row
        )


class ChangesRecordError(Exception):
    """Code has set a field of a dataclass that it was given; the message names the class."""


def is_record(value: Any) -> bool:
    """Whether a value is an object of a dataclass that is its fields and nothing more, as people write them
    to hand tensors from layer to layer.
    """
    cls = type(value)
    if not dataclasses.is_dataclass(cls) or is_more_than_its_fields(cls):
        return False
    return set(getattr(value, "__dict__", ())) <= {field.name for field in dataclasses.fields(cls)}


def is_more_than_its_fields(cls: type) -> bool:
    """Whether a dataclass computes something when it is made, so that its fields do not say all of it."""
    if not dataclasses.is_dataclass(cls):
        return False
    return hasattr(cls, "__post_init__") or not all(field.init for field in dataclasses.fields(cls))


def entries_of(record: Any) -> dict[str, Any]:
    """The fields of an object of a dataclass, by name."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def show_records(value: Any) -> None:
    """Let torch's walks through containers (`pytree`) come to the tensors in the dataclasses of a value."""
    for leaf in pytree.tree_leaves(value):
        if is_record(leaf):
            entries = list(entries_of(leaf).values())
            show_records(entries)
            if any(isinstance(entry, Tensor) for entry in pytree.tree_leaves(entries)):
                pytree.register_dataclass(type(leaf))


@contextlib.contextmanager
def records_kept(given: Any) -> Iterator[None]:
    """Notice code that sets fields of the dataclasses that it is given, as whoever else has them would see.

    Raises:
        ChangesRecordError: it does.
    """
    before = [(record, entries_of(record)) for record in _records_in(given)]
    yield
    for record, entries in before:
        now = entries_of(record)
        if any(now[name] is not entry for name, entry in entries.items()):
            raise ChangesRecordError(type(record).__name__)


def _records_in(value: Any) -> Iterator[Any]:
    inside: Iterable[Any] = ()
    if is_record(value):
        yield value
        inside = entries_of(value).values()
    elif isinstance(value, tuple | list | Mapping):
        inside = value.values() if isinstance(value, Mapping) else value
    for item in inside:
        yield from _records_in(item)


def with_items(value: Any, items: Sequence[Any]) -> Any:
    """A tuple or list of the class of another one, a named tuple among them, with other items."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def leaves_of(value: Any) -> list[Any]:
    """The leaves of nested tuples, lists, dicts, and objects that are mappings (model outputs)."""
    if isinstance(value, Mapping) and not isinstance(value, dict):
        value = dict(value)
    return [
        leaf for item in pytree.tree_leaves(value) for leaf in ([item] if item is value else _inner(item))
    ]


def _inner(item: Any) -> list[Any]:
    return leaves_of(item) if isinstance(item, Mapping) else [item]


def find_batch_dim(shape: tuple[int, ...], doubled: tuple[int, ...], batch_size: int) -> BatchDim:
    """Which dimension grew when the batch doubled."""
    if len(shape) != len(doubled):
        return BatchDim(None, mixes=True)
    grown = [dim for dim, (size, twice) in enumerate(zip(shape, doubled, strict=True)) if size != twice]
    if not grown:
        return BatchDim(None)
    dim = grown[0]
    if len(grown) > 1 or doubled[dim] != 2 * shape[dim] or shape[dim] % batch_size:
        return BatchDim(None, mixes=True)
    return BatchDim(dim, shape[dim] // batch_size)


def growth(value: Any, doubled: Any) -> int | None:
    """How a number grows with the batch: 0 not at all, 1 like x.shape[0], -1 like 1 / x.shape[0]; None:
    otherwise.
    """
    if any(isinstance(leaf, Tensor) for leaf in (*leaves_of(value), *leaves_of(doubled))):
        return None
    if value == doubled:
        return 0
    if not isinstance(value, int | float) or not isinstance(doubled, int | float) or value == 0:
        return None
    growths: dict[float, int] = {2.0: 1, 0.5: -1, 4.0: 2, 0.25: -2}
    return growths.get(doubled / value)


def depends_on_batch_size(
    node: fx.Node, values: Mapping[fx.Node, Any], doubled: Mapping[fx.Node, Any]
) -> bool:
    """Whether a number would be another for another size of the batch, even if doubling it makes no
    difference.

    Comparing two things that both grow with the batch (x.shape == y.shape) is no dependence.

    Args:
        values, doubled: what the nodes give for the batch and for twice the batch.
    """
    if any(isinstance(leaf, Tensor) for leaf in leaves_of(values[node])):
        return False
    if values[node] != doubled[node]:
        return True
    if node.target in (operator.eq, operator.ne):
        sides = [fx.node.map_arg(node.args, seen.__getitem__) for seen in (values, doubled)]
        if all(one != two for one, two in zip(*sides, strict=True)):
            return False
    if node.target is operator.getitem:
        return False  # a part of a shape that stays the same
    return any(depends_on_batch_size(source, values, doubled) for source in node.all_input_nodes)


def is_projection(node: fx.Node, shapes: Shapes) -> bool:
    """Whether a node only takes one thing out of a tuple, dict or object of tensors."""
    source = node.args[0]
    takes = node.target in (operator.getitem, builtins.getattr)
    return takes and isinstance(source, fx.Node) and shapes.holds_tensors(source)
