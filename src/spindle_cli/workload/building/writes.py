"""What an operation of torch writes to, by its schema; and refusing what writes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from spindle_cli.errors import WorkloadError

# Move their running statistics while training, of which their schemas say nothing.
_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_STATISTICS = frozenset({"running_mean", "running_var"})
# Take of a tensor nothing but its shape and type.
_BY_SHAPE = frozenset(
    {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}
)
_LIFTING = "aten::lift"
NO_MEMORY = 0  # of tensors without a storage
_FILLING = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_"})


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that it writes to, in lists (torch._foreach_mul_) and by keyword (out=) too."""
    written = _names_written(func)
    if not written:
        return []
    names = (argument.name for argument in func._schema.arguments)
    given = [*zip(names, args, strict=False), *kwargs.items()]
    moves = ("training", True) in [(name, value) for name, value in given if isinstance(value, bool)]
    return [
        tensor
        for name, value in given
        if written.get(name) or (moves and name in written)
        for tensor in pytree.tree_leaves(value)
        if isinstance(tensor, Tensor)
    ]


@cache
def _names_written(func: Any) -> dict[str, bool]:
    """The names of the arguments that an operation writes to: always, or only while it trains (False)."""
    schema = func._schema
    moving = _STATISTICS if schema.name.removeprefix("aten::") in _BATCH_NORMS else ()
    marked = {
        argument.name: bool(argument.alias_info and argument.alias_info.is_write)
        for argument in schema.arguments
    }
    return {name: is_marked for name, is_marked in marked.items() if is_marked or name in moving}


def overwritten_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation is given and does not read: what it fills (out= among them), and a
    batch norm's running statistics while it trains.
    """
    written = written_by(func, args, kwargs)
    name = func._schema.name.removeprefix("aten::")
    if name in _FILLING:
        return written[:1]
    if name in _BATCH_NORMS:
        return written
    out = [value for key, value in kwargs.items() if key in ("out", "out0", "out1", "out2")]
    return [tensor for tensor in written if any(tensor is value for value in out)]


class NotingWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Inside, it is noted whose memory operations write into, through `weight.data` too; not that of memory
    that is made there.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped
        self._written: dict[int, Tensor] = {}
        self._made: set[int | None] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            memory = memory_of(tensor)
            if memory is not None and memory not in self._made:
                self._written[memory] = tensor
        result = func(*args, **(kwargs or {}))
        if is_new(func):
            self._made |= {memory_of(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)}
        return result

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor was written into."""
        return memory_of(tensor) in self._written

    @property
    def tensors(self) -> list[Tensor]:
        """What was written into: of each memory one tensor."""
        return list(self._written.values())


def is_by_shape(func: Any) -> bool:
    """Whether an operation takes of tensors nothing but shape and type."""
    return func.overloadpacket.__name__ in _BY_SHAPE


def is_new(func: Any) -> bool:
    """Whether what an operation gives lies in no memory of what it is given."""
    is_lifted = func._schema.name.startswith(_LIFTING)  # a tensor of numbers, as it is made
    return is_lifted or all(result.alias_info is None for result in func._schema.returns)


def copy_once_written(tensor: Tensor) -> Tensor:
    """Return a copy that takes memory and time only if one of the two is written to.

    Nothing has to be compared to find out what has been: batch norm changes its running statistics without
    raising their version, and values could be looked at on the device alone.
    """
    values = tensor.detach()
    try:
        return torch._lazy_clone(values)
    except RuntimeError:  # memory that is not torch's own: numpy's, or a mapped file's
        return values.clone()


def share_memory(tensor: Tensor, copy: Tensor) -> bool:
    """Whether neither a tensor nor its copy (`copy_once_written`) has been written to."""
    # Asking for `data_ptr` would count as writing.
    address: Callable[[Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]  # private
    return address(tensor) == address(copy)


class RefusingWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Inside, an operation that would write into the memory of some tensors is refused.

    What is written through `weight.data`, as libraries of adapters do, raises no version.

    Attributes:
        refused: what was, first; code that collects what is raised, as load_state_dict does, hides it.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[tuple[str, Tensor]]],
        refusal: Callable[[str], WorkloadError],
        owner: Callable[[Container[int | None]], str | None] | None = None,
    ) -> None:
        """Take what is guarded.

        Args:
            tensors: gives them with their names.
            refusal: gives what is raised of one of these, or of an owner.
            owner: gives the name of what one of some memories (`memory_of`) was part of, or None.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped
        self._tensors = tensors
        self._refusal = refusal
        self._owner = owner
        self.refused: WorkloadError | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        written = {memory_of(tensor) for tensor in written_by(func, args, kwargs or {})} - {NO_MEMORY}
        if written:
            names = (name for name, tensor in self._tensors() if memory_of(tensor) in written)
            name = next(names, None)
            if name is None and self._owner is not None:
                name = self._owner(written)
            if name is not None:
                self.refused = self.refused or self._refusal(name)
                raise self.refused
        return func(*args, **(kwargs or {}))


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with a storage that one is made of: itself, or a sparse or nested one's parts."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return tuple(part for name in names for part in dense_parts(getattr(tensor, name)))
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def memory_of(tensor: Tensor) -> int:
    """Return a number that tells whose memory a tensor has; `NO_MEMORY` of a sparse one, which has none of
    its own.
    """
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else NO_MEMORY
