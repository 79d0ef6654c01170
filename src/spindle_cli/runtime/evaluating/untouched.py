"""Evaluate without a trace: what is trained goes on as if nothing had been evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from spindle_cli.errors import WorkloadError
from spindle_cli.runtime.step.held_state import HeldState
from spindle_cli.workload.training.item_draws import generators_kept


@contextmanager
def untouched(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Inside, modules are in eval mode; afterwards they have the modes, attributes and buffers of before, and
    generators of random numbers go on as if nothing had been drawn.

    Raises:
        WorkloadError: a module's own `eval` changes parameters (as one that merges adapters does).
    """
    with ExitStack() as stack:
        stack.enter_context(generators_kept())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        for module in modules:
            stack.callback(HeldState(module).restore)
            versions = _versions(module)
            module.eval()
            changed = [name for name, version in _versions(module).items() if versions.get(name) != version]
            if changed:
                raise WorkloadError(
                    f"{type(module).__name__}: putting it into eval mode changes parameter {changed[0]!r}, "
                    "which would not be trained any more as it was",
                    hint="Let `train(False)` leave parameters as they are; compute with them in forward.",
                )
        yield


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensor each parameter is, and how often it was changed."""
    return {name: (id(held), held._version) for name, held in module.named_parameters()}
