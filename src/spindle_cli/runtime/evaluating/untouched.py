"""Evaluate without a trace: what is trained goes on as if nothing had been evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from spindle_cli.runtime.step.held_state import HeldState
from spindle_cli.workload.training.item_draws import generators_kept


@contextmanager
def untouched(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Inside, modules are in eval mode; afterwards they have the modes, attributes and buffers of before, and
    generators of random numbers go on as if nothing had been drawn.
    """
    with ExitStack() as stack:
        stack.enter_context(generators_kept())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        for module in modules:
            stack.callback(HeldState(module).restore)
            module.eval()
        yield
