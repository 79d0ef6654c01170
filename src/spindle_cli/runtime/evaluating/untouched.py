"""Evaluate without a trace: what is trained goes on as if nothing had been evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.runtime.step.held_state import HeldState
from spindle_cli.workload.building.writes import RefusingWrites
from spindle_cli.workload.training.item_draws import generators_kept


@contextmanager
def untouched(
    modules: Sequence[nn.Module], device: torch.device, moved: Sequence[nn.Parameter] = ()
) -> Iterator[None]:
    """Inside, modules are in eval mode; afterwards they have the modes, attributes and buffers of before, and
    generators of random numbers go on as if nothing had been drawn.

    Args:
        moved: parameters that forward changes, which have their values of before, too.

    Raises:
        WorkloadError: a module's own `eval` changes parameters (as one that merges adapters does).
    """
    with ExitStack() as stack:
        stack.enter_context(generators_kept())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        with torch.no_grad():
            values = [(parameter, parameter.detach().clone()) for parameter in moved]
        stack.callback(_put_back, values)
        for module in modules:
            stack.callback(HeldState(module).restore)
            versions = _versions(module)
            with RefusingWrites(module.named_parameters, partial(_refusal, module)):
                module.eval()
            changed = [name for name, version in _versions(module).items() if versions.get(name) != version]
            if changed:
                raise _refusal(module, changed[0])
        yield


def _put_back(values: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, before in values:
        parameter.data.copy_(before)


def _refusal(module: nn.Module, name: str) -> WorkloadError:
    return WorkloadError(
        f"{type(module).__name__}: putting it into eval mode changes parameter {name!r}, which would not be "
        "trained any more as it was",
        hint="Let `train(False)` leave parameters as they are (loralib: merge_weights=False); compute with "
        "them in forward.",
    )


def _versions(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Which tensor each parameter is, in which memory it lies, and how often it was changed."""
    return {
        name: (id(held), held.untyped_storage()._cdata, held._version)
        for name, held in module.named_parameters()
    }
