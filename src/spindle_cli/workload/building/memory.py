"""The memory of tensors: what an operation of torch writes to, by its schema, and refusing what writes; and
what code of the user's has of the memory of a build's parameters and buffers, beside these themselves: arrays
of numpy's, and tensors that share it.

What is trained may have other memory later on, or be on other devices alone. So nothing that is written there
once the build is done would be what it is in one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
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


Array = np.ndarray[Any, Any]


class SeeingArrays(TorchFunctionMode):
    """Inside, `given` is told of each array of numpy's over the memory of a tensor, and of that tensor."""

    def __init__(self, given: Callable[[Array, Tensor], None]) -> None:
        super().__init__()
        self._given = given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, np.ndarray) and args and isinstance(args[0], Tensor) and _lies_in(made, args[0]):
            self._given(made, args[0])
        return made


def _lies_in(array: Array, tensor: Tensor) -> bool:
    memory = tensor.untyped_storage()
    place: int = array.__array_interface__["data"][0]
    return memory.data_ptr() <= place < memory.data_ptr() + memory.nbytes()


class HandedOut:
    """What builds of this process have handed out: arrays that they have made, and the memory that parameters
    and buffers had in them.
    """

    def __init__(self) -> None:
        self._arrays: list[weakref.ref[Array]] = []
        self._read_only: list[tuple[str, weakref.ref[Array]]] = []
        self._memories: list[tuple[str, Any]] = []  # with StorageWeakRefs

    def note(self, array: Array) -> None:
        """Remember an array that a build has made, as long as somebody has it."""
        self._arrays.append(weakref.ref(array))

    def end_of_build(self, task: str, prefix: str, module: nn.Module) -> None:
        """Take it that a task's module is built: arrays over its memory are read-only from here on, and it is
        known where that is. `prefix`: its name in the task.
        """
        self._memories = [memory for memory in self._memories if not memory[1].expired()]
        self._read_only = [read_only for read_only in self._read_only if read_only[1]() is not None]
        reference: Any = StorageWeakRef  # torch gives it no types
        arrays = [array for noted in self._arrays if (array := noted()) is not None]
        self._arrays = [weakref.ref(array) for array in arrays]
        for kind, name, tensor in _with_memory(module, prefix):
            said = f"the {kind} {named_of(task, name)}"
            self._memories.append((said, reference(tensor.untyped_storage())))
            for array in arrays if tensor.is_cpu else ():
                if _lies_in(array, tensor):
                    array.flags.writeable = False
                    self._read_only.append((said, weakref.ref(array)))

    def refused_by_array(self, error: BaseException, given: Iterable[str] = ()) -> str | None:
        """Return the parameters and buffers over whose memory an error says that a read-only array is; None
        if it says something else. `given`: of which there are such arrays, beside those of builds.
        """
        names = dict.fromkeys((*given, *(name for name, array in self._read_only if array() is not None)))
        if not names or not isinstance(error, ValueError) or "read-only" not in str(error):
            return None
        return " or ".join(names)

    def former_owner(self, memories: Container[int | None]) -> str | None:
        """Return the parameter or buffer that had one of some memories when it was built, if that is still
        there.

        Args:
            memories: what tells them apart, as torch's `UntypedStorage._cdata`.
        """
        return next(
            (name for name, memory in self._memories if memory.cdata in memories and not memory.expired()),
            None,
        )


def _with_memory(module: nn.Module, prefix: str) -> Iterator[tuple[str, str, Tensor]]:
    """Yield kind, name and tensor of the parameters and buffers of a module that have a memory of numbers."""
    for kind, named in (
        ("parameter", module.named_parameters(prefix)),
        ("buffer", module.named_buffers(prefix)),
    ):
        for name, tensor in named:
            is_dense = tensor.layout is torch.strided and not nn.parameter.is_lazy(tensor)
            if is_dense and not tensor.is_meta:
                yield kind, name, tensor


@cache
def handed_out() -> HandedOut:
    """Return what builds of this process have handed out."""
    return HandedOut()


@contextmanager
def noting_arrays() -> Iterator[None]:
    """Inside runs code of the user's that builds; arrays that it makes are noted.

    In the place of torch's method, and not by a mode, in which torch draws numbers otherwise.
    """
    tensors: Any = Tensor
    torch_numpy, is_redefined = tensors.numpy, "numpy" in vars(tensors)

    @wraps(torch_numpy)
    def numpy(self: Tensor, *args: Any, **kwargs: Any) -> Array:
        made: Array = torch_numpy(self, *args, **kwargs)
        handed_out().note(made)
        return made

    tensors.numpy = numpy
    try:
        yield
    finally:
        if is_redefined:
            tensors.numpy = torch_numpy
        else:
            del tensors.numpy


def named_of(task: str, name: str) -> str:
    """Return what messages call a parameter or buffer."""
    return f"{name!r} of task {task!r}"


def drop(parameters: Any) -> None:
    """Move parameters to the meta device in place: they stay the same objects, without their memory."""
    for parameter in list(parameters):
        to_meta(parameter)


def to_meta(parameter: nn.Parameter) -> None:
    """Move one parameter to the meta device in place."""
    if parameter.is_meta or is_lazy(parameter):
        return
    empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    stand_in = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    stand_in.__dict__.update(parameter.__dict__)
    swap(parameter, stand_in)


def swap(first: Tensor, second: Tensor) -> None:
    """Exchange what two tensors are; each stays the same object for all who hold it, with its own hooks.

    torch refuses those that somebody has weak references to, as an nn.GRU has to its weights: these are to
    the objects, so they hold as all others do. It refuses those, too, that autograd has saved, as what
    torch.nn.utils.weight_norm has computed of them does until the next forward pass, which computes it anew.
    """
    sides: tuple[Any, Any] = (first, second)
    if not any(weakref.getweakrefs(side) or side._use_count() > 2 for side in sides):
        torch.utils.swap_tensors(first, second)  # type: ignore[no-untyped-call]  # torch gives it no types
    else:
        first.__class__, second.__class__ = second.__class__, first.__class__
        first.__dict__, second.__dict__ = second.__dict__, first.__dict__
        torch._C._swap_tensor_impl(first, second)
    if any(side._backward_hooks for side in sides):
        # Autograd still calls the other's: torch attaches an object's own when they are set.
        for side in sides:
            side._backward_hooks = side._backward_hooks
