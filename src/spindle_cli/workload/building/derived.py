"""Which parameters were computed from which others while a workload was built.

torch.nn.utils.weight_norm, its parametrization, and code like theirs take a layer's weight, compute from it
what takes its place, and register that. A build in which such a parameter is to be real needs the first one
real, too, though no op uses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Derivations(TorchDispatchMode):
    """Inside, follows what is computed from parameters, by storages, which views share."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        # By storage, with a weak reference (another storage may come to be in its place), the numbers.
        self._sources: dict[int, tuple[Any, frozenset[int]]] = {}

    def of(self, tensor: Tensor) -> frozenset[int]:
        """Numbers of the parameters that a tensor was computed from."""
        reference, numbers = self._sources.get(tensor.untyped_storage()._cdata, (None, frozenset()))
        return frozenset() if reference is None or reference.expired() else numbers

    def note(self, tensor: Tensor, numbers: Iterable[int]) -> None:
        """A tensor has been computed from these parameters, and from what it was before."""
        reference: Any = StorageWeakRef  # torch gives it no types
        storage = reference(tensor.untyped_storage())
        self._sources[storage.cdata] = (storage, self.of(tensor) | frozenset(numbers))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        numbers = frozenset[int]().union(*map(self.of, _strided((args, kwargs))))
        if numbers:
            for tensor in _strided(result):
                self.note(tensor, numbers)
        return result


def _strided(tree: Any) -> list[Tensor]:
    return [
        item for item in pytree.tree_leaves(tree) if isinstance(item, Tensor) and item.layout == torch.strided
    ]
