"""Plain PyTorch whose operators round once more: how far rounding alone moves what it trains.

A plan computes the same numbers with other roundings: it adds up shares of a batch, and of a split layer.
What that does to a value depends on how much cancels on the way to it. Of a bias whose gradient is a small
difference of large sums it may be a thousandth in float32, and a half in bfloat16, where most values move by
an epsilon. So it is measured: every result of an operator, forward and backward, is moved by up to half an
epsilon of its own, as a rounding in another direction would (Monte Carlo arithmetic, Parker 1997).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Times that plain PyTorch is trained so: of a value that is one number a single draw may be small by chance.
DRAWS = 3
# Asks the plain process for it; which draw follows.
OPERATOR_NOISE_FLAG = "--operator-noise"
# Operators that hand on numbers as they are, or numbers of a lower precision, which a plan does alike.
# fmt: off
_EXACT = frozenset((
    "_to_copy", "abs", "amax", "amin", "arange", "cat",
    "clamp", "clone", "constant_pad_nd", "copy", "copysign", "detach",
    "embedding", "empty", "empty_like", "empty_strided", "eye", "fill",
    "flip", "full", "full_like", "gather", "index", "index_put",
    "index_select", "isnan", "lift_fresh", "masked_fill", "masked_select", "max",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "max_unpool2d", "maximum", "median", "min",
    "minimum", "neg", "new_empty", "new_full", "new_ones", "new_zeros",
    "one_hot", "ones", "ones_like", "relu", "repeat", "repeat_interleave",
    "roll", "round", "scalar_tensor", "scatter", "select_backward", "select_scatter",
    "sign", "slice_backward", "slice_scatter", "sort", "stack", "threshold_backward",
    "topk", "tril", "triu", "unique_dim", "where", "zeros",
    "zeros_like",
))
# fmt: on
# Operators of torch's CPU that add up rows of a batch in the low precision of their input: where there are
# many, a sum swallows what is added to it, and a plan's shares of the rows lose less. Others add in float32,
# and round their result alone.
# fmt: off
_SUMS_IN_LOW_PRECISION = frozenset((
    "_embedding_bag_backward", "embedding_dense_backward", "index_put",
    "index_reduce", "native_layer_norm_backward", "put",
))
# fmt: on
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class OperatorNoise(TorchDispatchMode):
    """Inside, results of operators are off in the last place: the same in every run of one number of a draw.

    Whole numbers stay as they are, as code compares them (masks, counts), and so does what is changed in
    place. What code has compiled rounds once.
    """

    def __init__(self, draw: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.draw = draw
        # Generators of its own: the training draws the same random numbers with and without.
        self._generators: dict[torch.device, torch.Generator] = {}

    @contextmanager
    def in_passes(self) -> Iterator[None]:
        """Return a context to run forward and backward passes in."""
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        is_view = any(returned.alias_info is not None for returned in schema.returns)
        name = schema.name.removeprefix("aten::")
        if is_view:
            return result
        has_moved = name in _SUMS_IN_LOW_PRECISION and self._sum_again(func, args, kwargs, result)
        if name in _EXACT and not has_moved:
            return result
        if torch.Tag.nondeterministic_seeded in func.tags and not _computes(args):
            return result  # numbers that are drawn, not computed
        with _disable_current_modes():  # one that lets nothing draw would let this draw nothing either
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.numel() > 0:
                    self._round_again(tensor)
        return result

    def _sum_again(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Move what an operator has summed to the other side of the sum in float32, no further off than it
        was: so may be a sum in another order, or of shares. Whether anything was off.
        """
        wide_args, wide_kwargs = pytree.tree_map(_widened, (args, kwargs or {}))
        has_moved = False
        with _disable_current_modes():  # as below
            wide_result = func(*wide_args, **wide_kwargs)
            for tensor, wide in zip(pytree.tree_leaves(result), pytree.tree_leaves(wide_result), strict=True):
                if not isinstance(tensor, Tensor) or wide.dtype != torch.float32:
                    continue
                off = wide - tensor.to(wide.dtype)
                draws = torch.rand(off.shape, generator=self._on(off.device), device=off.device)
                tensor.copy_(wide + off * draws)
                has_moved = has_moved or bool(off.any())
        return has_moved

    def _round_again(self, tensor: Tensor) -> None:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if not real.is_floating_point():
            return
        half = torch.finfo(real.dtype).eps / 2
        wide = torch.float64 if real.itemsize >= torch.float32.itemsize else torch.float32
        draws = torch.rand(real.shape, generator=self._on(real.device), device=real.device) * 2 - 1
        moved = real.to(wide) * (1 + half * draws.to(wide))
        real.copy_(torch.where(real == real.round(), real, moved.to(real.dtype)))

    def _on(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.draw)
        return self._generators[device]


def _widened(value: Any) -> Any:
    is_low = isinstance(value, Tensor) and value.dtype in _LOW_PRECISION
    return value.float() if is_low else value


def _computes(args: Any) -> bool:
    """Whether an operator that may draw is given numbers to compute with, as attention with dropout is."""
    return sum(isinstance(arg, Tensor) for arg in args) > 1
