"""The bytes of all tensors that are alive, and their peak: of this process, or of a run on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.workload.fixed.marks import tensors_in


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts every storage that an operation takes or makes, from then until it is freed.

    That is what the process asks of the allocator for tensors: neither the allocator's own reserves nor what
    a kernel takes and gives back within one operation. What other threads do is not seen.

    Attributes:
        held: bytes alive now.
        peak: the most since the last `begin`.
    """

    def __init__(self, held: Iterable[Tensor], itemsize: Callable[[torch.dtype], int] | None = None) -> None:
        """
        Args:
            held: tensors that are there already and count.
            itemsize: bytes of an element by dtype, for a run on fake tensors, whose storages are on the meta
                device; without it, real storages alone count.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._itemsize = itemsize
        self._sizes: dict[int, float] = {}
        self.held = 0.0
        self.peak = 0.0
        for tensor in held:
            self._note(tensor)

    def begin(self) -> None:
        """Forget the peak so far."""
        self.peak = self.held

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a question for a device
            return out
        for tensor in tensors_in((args, kwargs, out)):
            self._note(tensor)
        return out

    def _note(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        is_fake = storage.device.type == "meta"  # also of a fake tensor that says it is elsewhere
        if is_fake != (self._itemsize is not None):
            return
        key = storage._cdata
        if key in self._sizes:
            return
        size: float = storage.nbytes()
        if self._itemsize is not None:
            size *= self._itemsize(tensor.dtype) / tensor.dtype.itemsize
        self._sizes[key] = size
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._forget, key).atexit = False

    def resized(self, tensor: Tensor) -> None:
        """The storage of a tensor takes more or less memory than before, which no operation has said."""
        self._note(tensor)
        storage = tensor.untyped_storage()
        self.held += storage.nbytes() - self._sizes[storage._cdata]
        self._sizes[storage._cdata] = storage.nbytes()
        self.peak = max(self.peak, self.held)

    def _forget(self, key: int) -> None:
        self.held -= self._sizes.pop(key)
