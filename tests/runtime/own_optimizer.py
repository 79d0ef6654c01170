"""An optimizer of a user's own, that keeps a plain number beside a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Counting(torch.optim.Optimizer):
    """Steps by the mean of all gradients so far, times 0.9 to the power of their number."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["sum"], state["seen"] = torch.zeros_like(parameter), 0
                state["sum"] += parameter.grad
                state["seen"] += 1
                parameter.sub_(group["lr"] * 0.9 ** state["seen"] * state["sum"] / state["seen"])
