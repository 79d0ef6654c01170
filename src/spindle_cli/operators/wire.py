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
    """A view of a tensor that is summed, in numbers that can be."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()


# No number (NaN), with bits that no arithmetic makes, by the bytes of a number.
_NOTHING = {2: 0x7FD5, 4: 0x7FD5_AA55, 8: 0x7FFD_5AA5_55AA_A55A}
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def fill_with_nothing(tensor: Tensor) -> None:
    """Let a tensor say that there is no gradient, to who gets its bits."""
    bits = _bits(tensor)
    bits.fill_(_NOTHING[bits.element_size()])


def unless_nothing(tensor: Tensor) -> Tensor | None:
    """A tensor, with zeros where a part of it says that there is no gradient; None where all of it does. The
    host waits for it.
    """
    bits = _bits(tensor)
    is_nothing = bits == _NOTHING[bits.element_size()]
    count = int(is_nothing.count_nonzero())
    if count == bits.numel():
        return None
    if count:
        bits.masked_fill_(is_nothing, 0)
    return tensor


def _bits(tensor: Tensor) -> Tensor:
    """View a tensor's memory as whole numbers."""
    real = as_summed(tensor)
    return real.view(_WHOLE[real.element_size()])
