"""Memory of parameters and buffers that code of the user's has of a build, beside these themselves: arrays of
numpy's, and tensors that share it.

What is trained may have other memory later on, or be on other devices alone. So nothing that is written there
once the build is done would be what it is in one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

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
