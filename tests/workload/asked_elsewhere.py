"""Functions as users keep them in modules without any of a task's classes."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def doubled_if_tensor(h: Any, _: Tensor) -> Any:
    """What is a tensor twice, and the first of anything else."""
    return h * 2 if isinstance(h, Tensor) else h[0]
