"""What one device of a tensor-parallel group computes of a vocabulary that its devices share out.

Each device has the rows of an embedding, or of the head's weight, for consecutive words of its own. The cross
entropy over all words comes of three numbers for each token, of which each device has a part (Megatron-LM's
`vocab_parallel_cross_entropy`; Shoeybi et al., arXiv 1909.08053, section 3): the largest logit, the sum of
the exponentials, and the label's logit. No device ever has the logits of all words.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from spindle_cli.operators.tensor_group import TensorGroup, applied, sum_backward, sum_forward


@dataclass(frozen=True, eq=False)
class VocabularyPart:
    """The words [words * member // degree, words * (member + 1) // degree) of a vocabulary."""

    degree: int
    group: TensorGroup

    def first(self, words: int) -> int:
        """The number of the first word that this device has."""
        return words * self.group.member // self.degree

    def enter(self, hidden: Tensor) -> Tensor:
        """What goes into a head: all devices have it whole, and each finds a part of its gradient."""
        return sum_backward(hidden, self.group)

    def lookup(self, ids: Tensor, weight: Tensor, words: int, padding: int | None) -> Tensor:
        """Rows of an embedding of which the device has `weight` of shape (own words, D): ids.shape + (D,).

        Args:
            padding: a word whose row takes no gradient.

        Raises:
            RuntimeError: an id is none of the words (on a GPU the device says so, later).
        """
        _require(ids, (ids >= 0) & (ids < words), "an embedding's input is none of its words")
        local_ids, inside = self._local_ids(ids, words, len(weight))
        own_padding = None if padding is None else padding - self.first(words)
        if own_padding is not None and not 0 <= own_padding < len(weight):
            own_padding = None
        rows = functional.embedding(local_ids, weight, own_padding)
        return sum_forward(rows.masked_fill(~inside.unsqueeze(-1), 0.0), self.group)

    def cross_entropy(
        self,
        logits: Tensor,
        target: Tensor,
        words: int,
        ignore_index: int,
        label_smoothing: float,
        reduction: str,
    ) -> Tensor:
        """As `torch.nn.functional.cross_entropy` of the logits of all words, and labels.

        Args:
            logits: of this device's words, which lie along dimension 1 (0 where there is one dimension).

        Raises:
            RuntimeError: a label is neither a word nor ignored (on a GPU the device says so, later).
        """
        logits = _at_least_as_autocast(logits)
        if logits.dim() > 1:
            logits = logits.movedim(1, -1)
        counts = target != ignore_index
        _require(target, ~counts | ((target >= 0) & (target < words)), "a label is none of the head's words")
        local_labels, inside = self._local_ids(target, words, logits.shape[-1])
        rows = applied(
            _CrossEntropy, logits, local_labels, inside, counts, label_smoothing, words, self.group
        )
        if reduction == "sum":
            rows = rows.sum()
        elif reduction == "mean":
            rows = rows.sum() / counts.sum()
        return rows.to(logits.dtype)

    def logsumexp(self, logits: Tensor, dim: int, keepdim: bool) -> Tensor:
        """As `torch.logsumexp` of the logits of all words, which lie along `dim`."""
        logits = _at_least_as_autocast(logits)
        result = applied(_LogSumExp, logits.movedim(dim, -1), self.group)
        return (result.unsqueeze(dim) if keepdim else result).to(logits.dtype)

    def whole(self, logits: Tensor, words: int) -> Tensor:
        """The logits of all words, along the last dimension, from those of each device's; without
        gradients.
        """
        ends = [words * member // self.degree for member in range(self.degree + 1)]
        widths = [last - first for first, last in pairwise(ends)]
        return self.group.gather(logits.detach().movedim(-1, 0).contiguous(), widths).movedim(0, -1)

    def _local_ids(self, ids: Tensor, words: int, width: int) -> tuple[Tensor, Tensor]:
        """Which of the device's `width` words each is, and whether it is one of them; else the first."""
        local_ids = ids - self.first(words)
        inside = (local_ids >= 0) & (local_ids < width)
        return local_ids.masked_fill(~inside, 0), inside


def _require(ids: Tensor, fits: Tensor, why: str) -> None:
    if ids.numel():
        torch._assert_async(fits.all(), why)


def _at_least_as_autocast(logits: Tensor) -> Tensor:
    """What torch's own losses compute in: under autocast in float32."""
    is_narrow = logits.dtype in (torch.bfloat16, torch.float16)
    return logits.float() if is_narrow and torch.is_autocast_enabled(logits.device.type) else logits


def _exponentials(logits: Tensor, group: TensorGroup) -> tuple[Tensor, Tensor]:
    """Logits less the largest of all words, in at least float32, and that one."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = wide.amax(-1)
    group.max_(largest)
    return wide - largest.unsqueeze(-1), largest


class _CrossEntropy(torch.autograd.Function):
    """The cross entropy of each token, in at least float32; zero where a token does not count."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        local_labels: Tensor,
        inside: Tensor,
        counts: Tensor,
        smoothing: float,
        words: int,
        group: TensorGroup,
    ) -> Tensor:
        shifted, _ = _exponentials(logits, group)
        picked = shifted.gather(-1, local_labels.unsqueeze(-1)).squeeze(-1).masked_fill(~inside, 0.0)
        parts = [picked, shifted.sum(-1)] if smoothing else [picked]
        exponentials = shifted.exp_()
        parts.append(exponentials.sum(-1))
        sums = torch.stack(parts)
        group.sum_(sums, is_gradient=False)
        log_total = sums[-1].log()
        rows = (log_total - sums[0]) * (1 - smoothing)
        if smoothing:
            rows += (log_total - sums[1] / words) * smoothing
        probabilities = exponentials.div_(sums[-1].unsqueeze(-1)).to(logits.dtype)
        ctx.save_for_backward(probabilities, local_labels, inside, counts)
        ctx.smoothing, ctx.words = smoothing, words
        return rows.masked_fill_(~counts, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local_labels, inside, counts = ctx.saved_tensors
        row_grads = gradients[0].masked_fill(~counts, 0.0).to(probabilities.dtype)
        grads = probabilities * row_grads.unsqueeze(-1)
        of_labels = (row_grads * (ctx.smoothing - 1)).masked_fill(~inside, 0.0)
        grads.scatter_add_(-1, local_labels.unsqueeze(-1), of_labels.unsqueeze(-1))
        if ctx.smoothing:
            grads -= (row_grads * (ctx.smoothing / ctx.words)).unsqueeze(-1)
        return grads, *[None] * 6


class _LogSumExp(torch.autograd.Function):
    """log-sum-exp over the last dimension, in at least float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: TensorGroup) -> Tensor:
        shifted, largest = _exponentials(logits, group)
        exponentials = shifted.exp_()
        total = exponentials.sum(-1)
        group.sum_(total, is_gradient=False)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)).to(logits.dtype))
        return total.log() + largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        return probabilities * gradients[0].to(probabilities.dtype).unsqueeze(-1), None
