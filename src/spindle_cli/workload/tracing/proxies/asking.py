"""Let forward ask whether a traced value is a tensor."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn


@contextmanager
def tensors_are_known(tracer: Any, root: nn.Module) -> Iterator[None]:
    """Let `isinstance(x, Tensor)` and `torch.is_tensor(x)` take a traced tensor for one, by what
    `tracer.is_tensor` says.

    isinstance() is another in the modules alone that the task's classes are written in: torch's own code has
    to tell a traced value from a tensor.
    """

    def is_instance(item: Any, classes: Any, /) -> bool:
        if isinstance(item, classes):
            return True
        return isinstance(item, fx.Proxy) and _have_tensor(classes) and bool(tracer.is_tensor(item))

    def is_tensor(item: Any, /) -> bool:
        return is_instance(item, Tensor)

    names = {type(part).__module__ for part in root.modules()}
    written_in = [
        vars(sys.modules[name])
        for name in sorted(names)
        if name in sys.modules and name.partition(".")[0] not in ("torch", "builtins")
    ]
    own = [scope for scope in written_in if "isinstance" not in scope]
    original = torch.is_tensor
    try:
        for scope in own:
            scope["isinstance"] = is_instance
        torch.is_tensor = is_tensor  # type: ignore[assignment]
        yield
    finally:
        torch.is_tensor = original
        for scope in own:
            del scope["isinstance"]


def _have_tensor(classes: Any) -> bool:
    return classes is Tensor or (builtins.isinstance(classes, tuple) and any(map(_have_tensor, classes)))
