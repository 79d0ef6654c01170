"""Whole tensors from their fragments."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spindle_cli.files.fragments import Fragment, in_order


def joined(fragments: Mapping[Fragment | None, Tensor]) -> Tensor:
    """A tensor from its fragments, which lie side by side along one dimension; None: the tensor itself."""
    ordered = in_order(list(fragments))
    first = ordered[0]
    if first is None or len(ordered) == 1:
        return fragments[first]
    return torch.cat([fragments[each] for each in ordered], first.dim)
