"""Losses as people write them: of what a model gives and of the batch's fields."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from model_fuzz.pieces import WIDTH

# x: what the model gives [batch, tokens, channels]; label [batch]; target [batch, channels]; mask [batch,
# tokens], 0 or 1; padded [batch, tokens]: labels, of which -100 do not count, for some samples all.
Given = SimpleNamespace
Loss = Callable[["Head", Given], Tensor]


class Head(nn.Module):
    """A loss by name, with a linear map before it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.map = nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, 1)
        self.weights: Tensor
        self.register_buffer("weights", torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Tensor, label: Tensor, target: Tensor, mask: Tensor, padded: Tensor) -> Tensor:
        """The loss of the batch."""
        loss = {**MEANS, **SUMS, **PAIRED, **COUPLED}[self.kind]
        return loss(self, Given(x=self.map(x), label=label, target=target, mask=mask, padded=padded))


def _contrast(self: Head, g: Given) -> Tensor:
    left, right = functional.normalize(g.x.mean(1), dim=-1), functional.normalize(g.target, dim=-1)
    return functional.cross_entropy(left @ right.T, torch.arange(g.x.shape[0]))


def _two(self: Head, g: Given) -> Tensor:
    decay = 0.01 * self.map.weight.pow(2).sum()
    return functional.mse_loss(g.x[:, 0], g.target) + 0.1 * g.x.abs().mean() + decay


def _divergence(self: Head, g: Given) -> Tensor:
    given, wanted = g.x.mean(1).log_softmax(-1), g.target.softmax(-1)
    return functional.kl_div(given, wanted, reduction="batchmean")


def _tokens(self: Head, g: Given) -> Tensor:
    labels = g.label.unsqueeze(1).expand(-1, g.x.shape[1])
    return functional.cross_entropy(g.x.flatten(0, 1), labels.flatten(0, 1))


def _turned(self: Head, g: Given) -> Tensor:
    """Rows of the scores time first, of the labels batch first."""
    labels = g.label.unsqueeze(1).expand(-1, g.x.shape[1])
    return functional.cross_entropy(g.x.transpose(0, 1).reshape(-1, WIDTH), labels.reshape(-1))


def _square(self: Head, g: Given) -> Tensor:
    """(batch, 1) - (batch): batch x batch differences."""
    return (self.score(g.x[:, 0]) - g.target[:, 0]).pow(2).mean()


def _relative(self: Head, g: Given) -> Tensor:
    real, fake = self.score(g.x[:, 0]), self.score(g.x[:, 1])
    return functional.softplus(fake - real.mean()).mean()


def _rows(g: Given) -> tuple[Tensor, Tensor]:
    return g.x.flatten(0, 1), g.padded.flatten()


def _causal(self: Head, g: Given) -> Tensor:
    """As Hugging Face's ForCausalLMLoss has it."""
    labels = functional.pad(g.padded, (0, 1), value=-100)[..., 1:].contiguous()
    return functional.cross_entropy(g.x.view(-1, WIDTH), labels.view(-1), ignore_index=-100)


def _counted_sum(self: Head, g: Given) -> Tensor:
    return functional.cross_entropy(*_rows(g), reduction="sum") / (g.padded != -100).sum()


def _scores(self: Head, g: Given, scores: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, (g.label % 2).to(scores.dtype))


def _alike(self: Head, g: Given) -> Tensor:
    return functional.cosine_embedding_loss(g.x[:, 0], g.target, (g.label % 2) * 2 - 1)


def _masked(g: Given, values: Tensor) -> Tensor:
    """The values with NaN where the mask is 0."""
    return values.masked_fill(g.mask == 0, math.nan)


def _aligned(self: Head, g: Given, reduction: str) -> Tensor:
    """Two labels or one, of all tokens or all but one."""
    labels = torch.stack([g.label, g.label + 1], 1).clamp(1, WIDTH - 1)
    tokens, wanted = g.x.shape[1] - g.label % 2, 1 + (g.label % 3 == 0).long()
    logits = g.x.transpose(0, 1).log_softmax(-1)
    return functional.ctc_loss(logits, labels, tokens, wanted, reduction=reduction)


MEANS: dict[str, Loss] = {
    "mean": lambda self, g: g.x.pow(2).mean(),
    "squares": lambda self, g: functional.mse_loss(g.x[:, 0], g.target),
    "absolute": lambda self, g: functional.l1_loss(g.x.mean(1), g.target),
    "huber": lambda self, g: functional.smooth_l1_loss(g.x[:, 0], g.target),
    "classes": lambda self, g: functional.cross_entropy(g.x[:, 0], g.label),
    "smoothed classes": lambda self, g: functional.cross_entropy(g.x[:, 0], g.label, label_smoothing=0.1),
    "tokens": _tokens,
    "scores": lambda self, g: _scores(self, g, self.score(g.x[:, 0]).squeeze(-1)),
    "squeezed": lambda self, g: _scores(self, g, self.score(g.x[:, 0]).squeeze()),
    "positive scores": lambda self, g: functional.binary_cross_entropy_with_logits(
        g.x[:, 0], g.target.sigmoid(), pos_weight=self.weights
    ),
    "sum over size": lambda self, g: g.x.pow(2).sum() / g.x.shape[0],
    "two losses": _two,
    "triplet": lambda self, g: functional.triplet_margin_loss(g.x[:, 0], g.target, g.x[:, 1]),
    "cosine": _alike,
    "divergence": _divergence,
    "weighted": lambda self, g: (g.x.pow(2).mean((1, 2)) * g.mask[:, 0]).mean(),
    "sum of means": lambda self, g: torch.add(g.x.mean(), g.x.abs().mean(), alpha=0.5),
    "masked": lambda self, g: (g.x.pow(2).mean(-1) * g.mask).sum() / g.mask.sum(),
    "padded": lambda self, g: functional.cross_entropy(*_rows(g)),
    "padded, classes second": lambda self, g: functional.cross_entropy(g.x.transpose(1, 2), g.padded),
    "padded, weighted": lambda self, g: functional.cross_entropy(*_rows(g), weight=self.weights),
    "padded, other number": lambda self, g: functional.cross_entropy(
        g.x.flatten(0, 1), g.padded.clamp(min=0).flatten(), ignore_index=0
    ),
    "weighted classes": lambda self, g: functional.cross_entropy(g.x[:, 0], g.label, self.weights),
    "likelihood": lambda self, g: functional.nll_loss(g.x.log_softmax(-1).transpose(1, 2), g.padded),
    "causal": _causal,
    "counted sum": _counted_sum,
    "mean without NaN": lambda self, g: g.x.pow(2).nanmean(),
    "mean without missing": lambda self, g: _masked(g, g.x.pow(2).mean(-1)).nanmean(),
    "mean without unchosen": lambda self, g: torch.nanmean(
        torch.where(g.mask.unsqueeze(-1) > 0, g.x, math.nan).mean(-1).square()
    ),
    "over length": lambda self, g: g.x.pow(2).sum() / len(g.label),
    "gaussian": lambda self, g: functional.gaussian_nll_loss(g.x[:, 0], g.target, g.x[:, 1].pow(2) + 0.1),
    "gaussian by row": lambda self, g: functional.gaussian_nll_loss(
        g.x, g.x.detach() * 0.5, g.x.pow(2).mean(-1) + 0.1, full=True
    ),
    "alignments": lambda self, g: _aligned(self, g, "mean"),
    "alignments over length": lambda self, g: _aligned(self, g, "sum") / len(g.x),
}
# Of tasks with reduction="sum".
SUMS: dict[str, Loss] = {
    "sum": lambda self, g: g.x.pow(2).sum(),
    "sum of squares": lambda self, g: functional.mse_loss(g.x[:, 0], g.target, reduction="sum"),
    "sum of classes": lambda self, g: functional.cross_entropy(g.x[:, 0], g.label, reduction="sum"),
    "padded sum": lambda self, g: functional.cross_entropy(*_rows(g), reduction="sum"),
    "weighted sum": lambda self, g: functional.cross_entropy(*_rows(g), self.weights, reduction="sum"),
    "mean times size": lambda self, g: g.x.pow(2).mean() * g.x.shape[0],
    "gaussian sum": lambda self, g: functional.gaussian_nll_loss(
        g.x[:, 0], g.target, g.x[:, 1].pow(2) + 0.1, reduction="sum"
    ),
    "sum of alignments": lambda self, g: _aligned(self, g, "sum"),
    "masked sum": lambda self, g: (g.x.pow(2).mean(-1) * g.mask).sum(),
}
# Pairs of samples are compared, which may be split with what is compared gathered.
PAIRED: dict[str, Loss] = {"contrast": _contrast, "batch x batch": _square}


def _unless_none(self: Head, g: Given) -> Tensor:
    """Of the samples with a label above the middle, if there are any."""
    chosen = g.label > WIDTH // 2
    if chosen.sum() == 0:
        return 0 * g.x.sum()
    return functional.mse_loss(g.x[:, 0][chosen], g.target[chosen]) ** 2


def _hardest(self: Head, g: Given) -> Tensor:
    losses = (g.x[:, 0] - g.target).pow(2).mean(1)
    return losses.topk(int(0.3 * losses.numel())).values.mean()


def _above(self: Head, g: Given) -> Tensor:
    losses, _ = (g.x[:, 0] - g.target).pow(2).mean(1).sort(descending=True)
    if losses[2] > 1.0:
        return losses[losses > 1.0].mean()
    return losses[:3].mean()


def _weighed(self: Head, g: Given) -> Tensor:
    scale = g.mask.sum().item()
    return g.x.pow(2).mean() / max(scale, 1.0) + 0.1 * g.x[:, 0].abs().max()


COUPLED: dict[str, Loss] = {
    "root": lambda self, g: functional.mse_loss(g.x[:, 0], g.target).sqrt(),
    "softplus of a mean": lambda self, g: functional.softplus(g.x.mean()),
    "turned rows": _turned,
    "relative": _relative,
    "one less": lambda self, g: g.x.pow(2).sum() / (g.x.shape[0] + 1),
    "spread": lambda self, g: g.x.std(0).mean(),
    "log of a sum": lambda self, g: g.x.mean((1, 2)).logsumexp(0),
    "largest": lambda self, g: g.x.pow(2).mean((1, 2)).max(),
    "norm of a mean": lambda self, g: (
        functional.layer_norm(g.x.mean((0, 1)), (WIDTH,), self.map.bias).pow(2).mean()
    ),
    "own mask": lambda self, g: g.x.pow(2).sum() / (g.x > 0).sum(),
    "chosen by itself": lambda self, g: torch.where(g.x > 0, g.x, math.nan).nanmean(),
    "sum of means over length": lambda self, g: g.x.pow(2).sum() / len(g.label) ** 2,
    "unless there is none": _unless_none,
    "hardest": _hardest,
    "above a threshold": _above,
    "by a number": _weighed,
    "square of a count": lambda self, g: (g.x.pow(2).mean(-1) * g.mask).sum() / g.mask.sum().pow(2),
}
