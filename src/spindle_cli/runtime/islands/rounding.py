"""Numbers in fewer bits, for slow links: whole multiples of a scale that each parameter has.

The scale is the parameter's largest number over the largest multiple, of the whole parameter, whichever ranks
have parts of it: so what is sent, and what is trained, is the same under every plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_TYPES = {16: torch.int16, 8: torch.int8}


def largest_multiple(bits: int) -> int:
    """The largest multiple of the scale that so many bits hold."""
    return (1 << (bits - 1)) - 1


def scales_of(largest: Tensor, bits: int) -> Tensor:
    """From the largest absolute value of each parameter; where all are 0, any does."""
    return torch.where(largest > 0, largest / largest_multiple(bits), torch.ones_like(largest))


def rounded(values: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The nearest multiples, halves to the even one.

    Args:
        values: flat.
        scales: of each value.
    """
    most = largest_multiple(bits)
    return (values / scales).round().clamp(-most, most).to(_TYPES[bits])


def spread(scales: Tensor, sizes: Sequence[int]) -> Tensor:
    """The scale of each value: of ranges of these sizes that follow each other."""
    return scales.repeat_interleave(torch.tensor(sizes, device=scales.device))
