"""The bytes of all tensors that are alive in this process, and their peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation takes or makes, from then until it is freed.

    That is what the process asks of the allocator for tensors: neither the allocator's own reserves nor what
    a kernel takes and gives back within one operation. What other threads do is not seen: a dataset does not
    count, and of the batches only the one that is trained on. `peak`: the most bytes at once.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        """`held`: tensors that are there already and count."""
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._held = 0
        self.peak = 0
        for tensor in held:
            self._note(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return out

    def _note(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # also of a fake tensor that says it is elsewhere
            return
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._held += storage.nbytes()
        self.peak = max(self.peak, self._held)
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self._held -= self._sizes.pop(key)
