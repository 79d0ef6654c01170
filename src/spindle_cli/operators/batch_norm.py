"""Batch norm over the whole batch of an op whose shares run on several devices, as SyncBatchNorm computes it.

Each share has a mean and a variance of its own entries. Over the shares are summed, in float64 and per
channel, the sum and the squared sum of the entries, and their number; backward the sums of the gradient and
of its product with what was normalised (S. Ioffe, C. Szegedy, arXiv 1502.03167, section 3). Gradients of
scale and bias stay those of the share: they are summed with all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from spindle_cli.analysis.rules.batch_norms import shared_norms, with_forward
from spindle_cli.operators.autograd import applied
from spindle_cli.operators.tensor_group import TensorGroup

_aten = torch.ops.aten


class Statistics(NamedTuple):
    """The statistics of what a batch norm is given, over all shares.

    `mean`, `variance`: by channel, the variance over all entries (not all but one), in the numbers that are
    computed in. `entries`: of a channel, one float64.
    """

    mean: Tensor
    variance: Tensor
    entries: Tensor


class OverShares(nn.Module):
    """An op whose batch norms take their statistics from all shares of its batch."""

    def __init__(self, op: nn.Module, norms: Sequence[_BatchNorm], group: TensorGroup | None) -> None:
        """`norms`: those of the op. `group`: the devices that run a share each; None: there is one share."""
        super().__init__()
        self.op = op
        self._norms = tuple(norms)
        self._group = group

    def forward(self, *arguments: Any) -> Any:
        """Run the op on these arguments."""
        return self._run(_Run(self._group), arguments)

    def remembering(self) -> Callable[..., Any]:
        """The op as a function that is called twice: the second call takes the statistics that the first one
        has found, so that nothing is summed and no running statistic changes again.
        """
        recorded: list[Statistics] = []

        def call(*arguments: Any) -> Any:
            run = _Run(self._group, recorded, replays=bool(recorded))
            return self._run(run, arguments)

        return call

    def _run(self, run: _Run, arguments: Sequence[Any]) -> Any:
        with with_forward(self._norms, run.normalise):
            return self.op(*arguments)


@contextmanager
def summing_over(module: nn.Module, group: TensorGroup | None) -> Iterator[None]:
    """Let the batch norms of a module sum their statistics over a group inside; None: as they are, but that
    none looks at how many batches there were, which tensors without data do not know.
    """
    norms = shared_norms(module).values()
    with with_forward(norms, _whole if group is None else _Run(group).normalise):
        yield


def _whole(norm: _BatchNorm, tensor: Tensor) -> Tensor:
    keeps = norm.training and norm.track_running_stats
    running = (norm.running_mean, norm.running_var) if keeps else (None, None)
    return functional.batch_norm(tensor, *running, norm.weight, norm.bias, training=True, eps=norm.eps)


def over_shares(op: nn.Module, module: nn.Module, group: TensorGroup | None) -> nn.Module:
    """An op with the statistics of its batch norms summed over a group, where it has any.

    Args:
        op: what is called.
        module: that has the op's batch norms; `op` itself or a part of it.
        group: the devices that run a share each. None: one device has the whole batch; then SyncBatchNorm
            sums over nobody, and the host waits for no count of batches (`momentum=None`).
    """
    norms = tuple(shared_norms(module).values())
    if group is None:
        norms = tuple(n for n in norms if isinstance(n, nn.SyncBatchNorm) or n.momentum is None)
    return OverShares(op, norms, group) if norms else op


@dataclass
class _Run:
    """One run of an op. `recorded`: the statistics of its batch norms in the order of their calls."""

    group: TensorGroup | None
    recorded: list[Statistics] = field(default_factory=list)
    replays: bool = False
    _next: int = 0

    def normalise(self, norm: _BatchNorm, tensor: Tensor) -> Tensor:
        """Run one batch norm of the op."""
        if self.group is None and norm.momentum is not None:
            return _BatchNorm.forward(norm, tensor)
        norm._check_input_dim(tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if self.replays:
            statistics = self.recorded[self._next]
            self._next += 1
        else:
            statistics = find_statistics(tensor, self.group)
            self.recorded.append(statistics)
            update_running(norm, statistics)
        return applied(_Normalised, tensor, norm.weight, norm.bias, statistics, norm.eps, self.group)


def find_statistics(tensor: Tensor, group: TensorGroup | None) -> Statistics:
    """Find the statistics of (rows, channels, ...) of all shares, of which this has one; one sum of 2 x
    channels + 1 numbers.

    Raises:
        PeerLostError: as `TensorGroup.sum_`.
    """
    wide, channels = _wide(tensor), tensor.shape[1]
    entries = tensor.numel() // channels
    dims = [0, *range(2, tensor.dim())]
    share_variance, share_mean = torch.var_mean(tensor.detach().to(wide), dims, correction=0)
    mean = share_mean.to(torch.float64)
    sums = torch.cat(
        [mean, torch.addcmul(share_variance.to(torch.float64), mean, mean), mean.new_ones(1)]
    ).mul_(entries)
    if group is not None:
        group.sum_(sums, is_gradient=False)
    total = sums[-1]
    mean, squares = (sums[:-1] / total).view(2, channels)
    variance = torch.addcmul(squares, mean, mean, value=-1).clamp_(min=0)  # less than 0 by rounding alone
    return Statistics(mean.to(wide), variance.to(wide), total)


@torch.no_grad()
def update_running(norm: _BatchNorm, statistics: Statistics) -> None:
    """Running statistics, as `_BatchNorm.forward` keeps them: the same on all devices of the group.

    Autograd is not told of the change, as torch's own batch norms do not tell it: another task's pass through
    the same norm has kept the statistics without need, and could not run backward any more.
    """
    if not (norm.training and norm.track_running_stats):
        return
    momentum: float | Tensor | None = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:  # the mean of all batches
            momentum = 1.0 / norm.num_batches_tracked.to(torch.float64)
    unbiased = statistics.variance * (statistics.entries / (statistics.entries - 1))
    for running, new in ((norm.running_mean, statistics.mean), (norm.running_var, unbiased)):
        if running is not None:
            weight = momentum.to(running.dtype) if isinstance(momentum, Tensor) else momentum or 0.0
            running.data.lerp_(new.to(running.dtype), weight)


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype to compute in: at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


class _Normalised(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) x weight + bias, where mean and variance depend on all shares' x."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Statistics,
        eps: float,
        group: TensorGroup | None,
    ) -> Tensor:
        mean, variance, entries = statistics
        scale = None if weight is None else weight.to(mean.dtype)
        shift = None if bias is None else bias.to(mean.dtype)
        ctx.save_for_backward(tensor, weight, mean, variance, entries)
        ctx.eps, ctx.group = eps, group
        ctx.bias_dtype = None if bias is None else bias.dtype
        result: Tensor = _aten.native_batch_norm(tensor, scale, shift, mean, variance, False, 0.0, eps)[0]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensor, weight, mean, variance, entries = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        # As if the statistics were fixed; what comes through them is taken off below.
        of_input, of_scale, of_shift = _aten.native_batch_norm_backward(
            gradients[0], tensor, scale, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        if ctx.needs_input_grad[0]:
            sums = torch.stack([of_shift, of_scale]).to(torch.float64)
            if ctx.group is not None:
                ctx.group.sum_(sums, is_gradient=True)
            deviation = torch.rsqrt(variance + ctx.eps)
            level, slope = (sums / entries).to(mean.dtype) * (scale * deviation)
            slope = slope * deviation
            level = torch.addcmul(level, mean, slope, value=-1)
            shape = (1, -1, *(1,) * (tensor.dim() - 2))
            through = torch.addcmul(level.view(shape), tensor.to(mean.dtype), slope.view(shape))
            of_input = of_input.to(mean.dtype).sub_(through).to(tensor.dtype)
        return (
            of_input if ctx.needs_input_grad[0] else None,
            of_scale.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            of_shift.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )
