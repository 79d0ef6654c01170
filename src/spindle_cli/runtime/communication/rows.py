"""Rows of a value: the part of its batch dimension that belongs to some samples of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spindle_cli.workload.graph import ValueSpec

if TYPE_CHECKING:
    from torch import Tensor

Samples = tuple[int, int]  # [first, last) of a task's batch


def take_rows(tensor: Tensor, spec: ValueSpec, held: Samples, wanted: Samples) -> Tensor:
    """A view of the rows of `wanted` in a tensor that holds the rows of `held`; all of it without a batch
    dimension.
    """
    if spec.batch_dim is None or held == wanted:
        return tensor
    assert held[0] <= wanted[0] <= wanted[1] <= held[1], f"samples {wanted} are not within {held}"
    start = (wanted[0] - held[0]) * spec.rows_per_sample
    return tensor.narrow(spec.batch_dim, start, (wanted[1] - wanted[0]) * spec.rows_per_sample)


def gradient_of_copy(gradient: Tensor, held: Samples, wanted: Samples) -> Tensor:
    """Give the part of the gradient of a value without a batch dimension that goes to the producer's share
    that has the samples `wanted` of those `held`: all of it to the one that the copy was taken from, to
    others zeros.
    """
    return gradient if wanted[0] == held[0] else torch.zeros_like(gradient)


def empty_share(spec: ValueSpec, samples: Samples, device: torch.device) -> Tensor:
    """Uninitialised memory for the rows of `samples`."""
    return torch.empty(spec.shape_of(samples[1] - samples[0]), dtype=spec.dtype, device=device)
