"""Batch norms whose statistics can be summed over the shares of a batch, as SyncBatchNorm's are.

Their sums, squared sums and counts add up, and so do the two sums of their backward pass: an op that couples
its samples by them alone may be split (`operators/batch_norm.py` runs it). What is asked here is which those
are, and what such an op does apart from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

# Exactly these: what a class made from them does in its own forward is not known.
_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def normalises(part: nn.Module) -> bool:
    """Whether a module is a batch norm that takes its statistics from the batch."""
    if not isinstance(part, _BatchNorm):
        return False
    return part.training or (part.running_mean is None and part.running_var is None)


def shared_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms of a module whose statistics can be summed over shares, by dotted name, each once."""
    return {name: part for name, part in module.named_modules() if _is_shared(part)}


def has_other_norms(module: nn.Module) -> bool:
    """Whether a module has a batch norm of which that is not known."""
    return any(normalises(part) and not _is_shared(part) for part in module.modules())


def _is_shared(part: nn.Module) -> bool:
    return type(part) in _KNOWN and "forward" not in part.__dict__ and normalises(part)


def is_statistic(root: nn.Module, name: str) -> bool:
    """Whether a buffer is a running statistic that its norm's forward changes, and computes nothing with."""
    owner = root.get_submodule(name.rpartition(".")[0])
    norm = nn.modules.batchnorm._NormBase  # of batches, and of instances
    return isinstance(owner, norm) and owner.training and owner.track_running_stats


def statistics_of(module: nn.Module) -> list[str]:
    """The running statistics that a module's forward changes."""
    return [name for name, _ in module.named_buffers() if is_statistic(module, name)]


@contextmanager
def with_forward(
    norms: Iterable[_BatchNorm], forward: Callable[[_BatchNorm, Tensor], Tensor]
) -> Iterator[None]:
    """Let batch norms compute `forward(norm, input)` inside."""
    held = tuple(norms)
    try:
        for norm in held:
            norm.__dict__["forward"] = partial(forward, norm)
        yield
    finally:
        for norm in held:
            norm.__dict__.pop("forward", None)


@contextmanager
def by_fixed_statistics(module: nn.Module | None, *, is_whole: bool = False) -> Iterator[list[Tensor]]:
    """Let a module's batch norms that can be shared act on samples one by one inside, and leave their buffers
    alone: what is left is what the module does apart from them. Gives what they were given, in order.

    `is_whole`: what they are given comes from the whole batch, and must be enough of it.
    """
    given: list[Tensor] = []

    def forward(norm: _BatchNorm, tensor: Tensor) -> Tensor:
        norm._check_input_dim(tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if is_whole and tensor.numel() == norm.num_features:
            raise ValueError(  # as torch says it
                f"Expected more than 1 value per channel when training, got input size {tensor.size()}"
            )
        given.append(tensor)
        mean = torch.zeros(norm.num_features, dtype=tensor.dtype, device=tensor.device)
        return functional.batch_norm(
            tensor, mean, torch.ones_like(mean), norm.weight, norm.bias, training=False, eps=norm.eps
        )

    with with_forward(() if module is None else shared_norms(module).values(), forward):
        yield given
