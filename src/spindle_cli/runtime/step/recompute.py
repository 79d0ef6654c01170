"""Recomputation: an op keeps its inputs alone, and runs forward once more when its backward pass needs the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch import Tensor


def run_recomputed(module: nn.Module, arguments: Sequence[Any]) -> Any:
    """`module(*arguments)`, keeping for the backward pass the arguments instead of what it computes.

    The second forward pass draws the random numbers of the first, and sees the buffers that the first saw;
    what it does to them is undone, so that running statistics count every batch once.
    """
    buffers = ChangedBuffers(module)
    return checkpoint(
        module, *arguments, use_reentrant=False, context_fn=buffers.contexts, preserve_rng_state=True
    )


class ChangedBuffers:
    """What a forward pass changes in place of a module's buffers, as it was before."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: list[tuple[Tensor, Tensor]] = []

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What the first forward pass runs in, and what the second one does."""
        return self._first(), self._again()

    @contextmanager
    def _first(self) -> Iterator[None]:
        seen = [(buffer, _copy_once_written(buffer)) for buffer in self._module.buffers()]
        yield
        # Only what has changed is kept until the backward pass.
        self._before = [(buffer, before) for buffer, before in seen if not _share_memory(buffer, before)]

    @contextmanager
    def _again(self) -> Iterator[None]:
        after = [buffer.clone() for buffer, _ in self._before]
        self._set([before for _, before in self._before])
        try:
            yield
        finally:
            self._set(after)

    def _set(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for (buffer, _), value in zip(self._before, values, strict=True):
                buffer.copy_(value)


def _copy_once_written(tensor: Tensor) -> Tensor:
    """A copy that takes memory and time only if one of the two is written to.

    Nothing has to be compared to find out what has been: batch norm changes its running statistics without
    raising their version, and values could be looked at on the device alone.
    """
    try:
        return torch._lazy_clone(tensor)
    except RuntimeError:  # memory that is not torch's own: numpy's, or a mapped file's
        return tensor.clone()


def _share_memory(tensor: Tensor, copy: Tensor) -> bool:
    # Asking for `data_ptr` would count as writing.
    address: Callable[[Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]
    return address(tensor) == address(copy)
