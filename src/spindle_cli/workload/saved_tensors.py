"""Hooks on what autograd saves, in code of a user's that may use torch.func.

torch.func's transformations (`grad`, `vmap`, `jacrev`, ...) refuse to run while hooks on saved tensors are
set. Those that are set here are not the user's, so transformations step over them: what they save inside is
seen by none of these hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class SavedTensorsHooks:
    """A context in which autograd gives what it saves to `pack`, and takes it back from `unpack`.

    `stepped_over`: whether a transformation of torch.func has run in it, whose saved tensors it has not seen.
    """

    def __init__(self, pack: Pack, unpack: Unpack) -> None:
        self.stepped_over = False
        self._hooks = graph.saved_tensors_hooks(pack, unpack)
        self._disable: Any = None

    def __enter__(self) -> SavedTensorsHooks:
        self._hooks.__enter__()
        self._disable = graph.disable_saved_tensors_hooks
        graph.disable_saved_tensors_hooks = self._disabled
        return self

    def __exit__(self, *error: Any) -> None:
        graph.disable_saved_tensors_hooks = self._disable
        self._hooks.__exit__(*error)

    @contextmanager
    def _disabled(self, error_message: str) -> Iterator[None]:
        """What torch.func enters: without as many hooks as were set here. A user's own are left over
        then, and torch refuses them as ever.
        """
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is None:
            with self._outside(error_message):
                yield
            return
        self.stepped_over = True
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with self._outside(error_message):
                yield
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(*top)

    def _outside(self, error_message: str) -> AbstractContextManager[None]:
        entered: AbstractContextManager[None] = self._disable(error_message)
        return entered


def saved_behind(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors that autograd has saved for the backward pass of these, one for each that it has noted."""
    waiting: list[Any] = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names = (name for name in dir(node) if name.startswith("_saved_"))
        values = [*(getattr(node, name) for name in names), *(getattr(node, "saved_tensors", None) or ())]
        for value in values:
            several = value if isinstance(value, tuple) else (value,)
            yield from (each for each in several if isinstance(each, Tensor))
        waiting.extend(following for following, _ in node.next_functions)
