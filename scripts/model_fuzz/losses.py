"""Losses as people write them: of what a model gives and of the batch's fields."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from model_fuzz.pieces import WIDTH

# (output [batch, tokens, channels], label [batch], target [batch, channels], mask [batch, tokens]) -> loss
Loss = Callable[["Head", Tensor, Tensor, Tensor, Tensor], Tensor]


class Head(nn.Module):
    """A loss by name, with a linear map before it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.map = nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, label: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        """The loss of the batch."""
        return (MEANS.get(self.kind) or COUPLED[self.kind])(self, self.map(x), label, target, mask)


def _contrast(self: Head, x: Tensor, label: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    left, right = functional.normalize(x.mean(1), dim=-1), functional.normalize(target, dim=-1)
    return functional.cross_entropy(left @ right.T, torch.arange(x.shape[0]))


def _two(self: Head, x: Tensor, label: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return functional.mse_loss(x[:, 0], target) + 0.1 * x.abs().mean() + 0.01 * self.map.weight.pow(2).sum()


def _triplet(self: Head, x: Tensor, label: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return functional.triplet_margin_loss(x[:, 0], target, x[:, 1])


def _cosine(self: Head, x: Tensor, label: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return functional.cosine_embedding_loss(x[:, 0], target, (label % 2) * 2 - 1)


def _divergence(self: Head, x: Tensor, label: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    given, wanted = x.mean(1).log_softmax(-1), target.softmax(-1)
    return functional.kl_div(given, wanted, reduction="batchmean")


def _tokens(self: Head, x: Tensor, label: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    labels = label.unsqueeze(1).expand(-1, x.shape[1])
    return functional.cross_entropy(x.flatten(0, 1), labels.flatten(0, 1))


def _turned(self: Head, x: Tensor, label: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Rows of the scores time first, of the labels batch first."""
    labels = label.unsqueeze(1).expand(-1, x.shape[1])
    return functional.cross_entropy(x.transpose(0, 1).reshape(-1, WIDTH), labels.reshape(-1))


def _square(self: Head, x: Tensor, label: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """(batch, 1) - (batch): batch x batch differences."""
    return (self.score(x[:, 0]) - target[:, 0]).pow(2).mean()


def _relative(self: Head, x: Tensor, label: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    real, fake = self.score(x[:, 0]), self.score(x[:, 1])
    return functional.softplus(fake - real.mean()).mean()


MEANS: dict[str, Loss] = {
    "mean": lambda self, x, label, target, mask: x.pow(2).mean(),
    "squares": lambda self, x, label, target, mask: functional.mse_loss(x[:, 0], target),
    "absolute": lambda self, x, label, target, mask: functional.l1_loss(x.mean(1), target),
    "huber": lambda self, x, label, target, mask: functional.smooth_l1_loss(x[:, 0], target),
    "classes": lambda self, x, label, target, mask: functional.cross_entropy(x[:, 0], label),
    "smoothed classes": lambda self, x, label, target, mask: functional.cross_entropy(
        x[:, 0], label, label_smoothing=0.1
    ),
    "tokens": _tokens,
    "scores": lambda self, x, label, target, mask: functional.binary_cross_entropy_with_logits(
        self.score(x[:, 0]).squeeze(-1), (label % 2).to(x.dtype)
    ),
    "squeezed": lambda self, x, label, target, mask: functional.binary_cross_entropy_with_logits(
        self.score(x[:, 0]).squeeze(), (label % 2).to(x.dtype)
    ),
    "sum over size": lambda self, x, label, target, mask: x.pow(2).sum() / x.shape[0],
    "two losses": _two,
    "triplet": _triplet,
    "cosine": _cosine,
    "divergence": _divergence,
    "weighted": lambda self, x, label, target, mask: (x.pow(2).mean((1, 2)) * mask[:, 0]).mean(),
    "sum of means": lambda self, x, label, target, mask: torch.add(x.mean(), x.abs().mean(), alpha=0.5),
    "masked": lambda self, x, label, target, mask: (x.pow(2).mean(-1) * mask).sum() / mask.sum(),
}
COUPLED: dict[str, Loss] = {
    "contrast": _contrast,
    "root": lambda self, x, label, target, mask: functional.mse_loss(x[:, 0], target).sqrt(),
    "softplus of a mean": lambda self, x, label, target, mask: functional.softplus(x.mean()),
    "turned rows": _turned,
    "batch x batch": _square,
    "relative": _relative,
    "one less": lambda self, x, label, target, mask: x.pow(2).sum() / (x.shape[0] + 1),
    "spread": lambda self, x, label, target, mask: x.std(0).mean(),
    "log of a sum": lambda self, x, label, target, mask: x.mean((1, 2)).logsumexp(0),
    "largest": lambda self, x, label, target, mask: x.pow(2).mean((1, 2)).max(),
    "norm of a mean": lambda self, x, label, target, mask: (
        functional.layer_norm(x.mean((0, 1)), (WIDTH,), self.map.bias).pow(2).mean()
    ),
}
