"""How tensors go over a communicator whose library knows fewer types of numbers than torch.

torch's group for NCCL has whole numbers of 8, 32 and 64 bits, and real ones (its `getNcclDataType`): others
go as their bytes, and complex numbers as pairs of real ones. torch.distributed does the latter by itself, but
not in a reduce-scatter. gloo takes more; what goes over it goes in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

KNOWN = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)


def as_sent(tensor: Tensor) -> Tensor:
    """What goes over a communicator of a contiguous tensor that is sent, received or gathered: a view of it,
    but where it is the conjugate, or the negative, of what its memory has.
    """
    if tensor.dtype in KNOWN:
        return tensor.resolve_neg()
    if tensor.is_complex():
        return as_summed(tensor)
    return tensor.reshape(-1).view(torch.uint8)


def as_summed(tensor: Tensor) -> Tensor:
    """The same of a tensor that is summed."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
