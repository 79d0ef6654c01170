"""What code of a user's does with autograd beside a backward pass: it asks for gradients itself, or for
hooks; and hooks on what autograd saves, where that code may use torch.func.

torch.func's transformations (`grad`, `vmap`, `jacrev`, ...) refuse to run while hooks on saved tensors are
set. Those that are set here are not the user's, so transformations step over them: what they save inside is
seen by none of these hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.overrides import TorchFunctionMode

# Whether hooks on the gradients of leaves (`register_hook` of a parameter, or of what an operator is given)
# last where hooks on saved tensors are set. Before torch 2.10 they do not: a function of autograd's that is
# written in Python, such as torch.compile's or a user's, unpacks a leaf that it has saved as another Python
# object, and when that one ends torch clears the hooks of the leaf itself, for good. Those behind the node
# that accumulates last.
KEEPS_GRADIENT_HOOKS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class _SteppedOver:
    """What torch.func enters in place of torch's `disable_saved_tensors_hooks` while hooks are set here.

    Hooks are a thread's, what torch.func enters is the process's: it is put in place with the first hooks of
    any thread and taken away with the last, in whatever order threads end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._of_thread = threading.local()
        self._of_torch: Any = None

    def set(self, hooks: SavedTensorsHooks) -> None:
        self._of_this_thread().append(hooks)
        with self._lock:
            if not self._count:
                self._of_torch = graph.disable_saved_tensors_hooks
                graph.disable_saved_tensors_hooks = self._disabled
            self._count += 1

    def unset(self, hooks: SavedTensorsHooks) -> None:
        self._of_this_thread().remove(hooks)
        with self._lock:
            self._count -= 1
            if not self._count:
                graph.disable_saved_tensors_hooks = self._of_torch

    def _of_this_thread(self) -> list[SavedTensorsHooks]:
        hooks: list[SavedTensorsHooks] = vars(self._of_thread).setdefault("hooks", [])
        return hooks

    @contextmanager
    def _disabled(self, error_message: str) -> Iterator[None]:
        """Disables hooks without as many as this thread has set here. A user's own are left over then, and
        torch refuses them as ever.
        """
        popped: list[Any] = []
        for hooks in self._of_this_thread():
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if top is not None:
                torch._C._autograd._pop_saved_tensors_default_hooks()
                hooks.stepped_over = True
                popped.append(top)
        try:
            with self._of_torch(error_message):
                yield
        finally:
            for top in reversed(popped):
                torch._C._autograd._push_saved_tensors_default_hooks(*top)


_STEPPED_OVER = _SteppedOver()


class SavedTensorsHooks:
    """A context in which autograd gives what it saves to `pack`, and takes it back from `unpack`.

    `stepped_over`: whether a transformation of torch.func has run in it, whose saved tensors it has not seen.
    """

    def __init__(self, pack: Pack, unpack: Unpack) -> None:
        self.stepped_over = False
        self._hooks = graph.saved_tensors_hooks(pack, unpack)

    def __enter__(self) -> SavedTensorsHooks:
        self._hooks.__enter__()
        _STEPPED_OVER.set(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _STEPPED_OVER.unset(self)
        self._hooks.__exit__(*error)


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
            yield from (saved for saved in several if isinstance(saved, Tensor))
        waiting.extend(following for following, _ in node.next_functions)


ASKS_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


@dataclass
class Asking(TorchFunctionMode):
    """Notes whether gradients are asked for inside, and whether tensors get hooks."""

    asks: bool = False
    hooks: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.asks = self.asks or func in ASKS_GRADIENTS
        self.hooks = self.hooks or func is Tensor.register_hook
        return func(*args, **(kwargs or {}))
