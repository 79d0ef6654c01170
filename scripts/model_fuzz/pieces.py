"""Pieces of models: what each does to [batch, tokens, channels], and whether it couples the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

TOKENS, WIDTH, HEADS = 4, 8, 2
# What decides by a mean is not to be decided by rounding: behind a layer norm the mean is 0 but for that.
_POSITIVE = 0.01
Step = Callable[["Piece", Tensor], Tensor]


class Piece(nn.Module):
    """One step of a model, by name; with the layers that steps need."""

    layer: Any
    average: Tensor

    def __init__(self, kind: str, alpha: float) -> None:
        super().__init__()
        self.kind, self.alpha = kind, alpha
        make = _LAYERS.get(kind)
        self.layer = make() if make is not None else nn.Linear(WIDTH, WIDTH)
        if kind == "moving average":
            self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, channels], as it is given."""
        step = {**SEPARATE, **INSIDE, **COUPLING}[self.kind]
        return step(self, x)


def _heads(self: Piece, x: Tensor) -> Tensor:
    """Attention with the batch and the heads merged."""
    batch, tokens, width = x.shape
    parts = self.layer(x).view(batch, tokens, HEADS, width // HEADS)
    merged = parts.transpose(1, 2).reshape(batch * HEADS, tokens, width // HEADS)
    scores = (merged @ merged.transpose(1, 2)).softmax(-1)
    return x + (scores @ merged).view(batch, HEADS, tokens, -1).transpose(1, 2).flatten(2)


def _causal(self: Piece, x: Tensor) -> Tensor:
    scores = x @ x.transpose(1, 2)
    mask = torch.ones(TOKENS, TOKENS).triu(1).bool()
    return x + scores.masked_fill(mask, -1e9).softmax(-1) @ self.layer(x)


def _time_first(self: Piece, x: Tensor) -> Tensor:
    batch = x.shape[0]
    rows = x.transpose(0, 1).reshape(TOKENS * batch, WIDTH)
    return torch.tanh(self.layer(rows)).view(TOKENS, batch, WIDTH).transpose(0, 1)


def _class_token(self: Piece, x: Tensor) -> Tensor:
    token = self.layer.bias.view(1, 1, -1).expand(x.shape[0], -1, -1)
    joined = torch.cat([token, x], dim=1)
    return joined[:, 1:] * joined[:, :1]


def _picked(self: Piece, x: Tensor) -> Tensor:
    chosen = x[torch.arange(x.shape[0]), x[..., 0].argmax(-1)]
    return self.layer(x) + chosen.unsqueeze(1)


def _channels_first(self: Piece, x: Tensor) -> Tensor:
    return x + self.layer(x.transpose(1, 2)).transpose(1, 2)


def _moving_average(self: Piece, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.average.mul_(0.5).add_(x.mean((0, 1)), alpha=0.5)
    return self.layer(x) - self.average


def _training_only(self: Piece, x: Tensor) -> Tensor:
    if self.training:
        x = x - x.mean(0)
    return self.layer(x)


def _few_samples(self: Piece, x: Tensor) -> Tensor:
    return self.layer(x) * (1.0 if x.shape[0] > 3 else 2.0)


def _halves(self: Piece, x: Tensor) -> Tensor:
    return x + self.layer(x.chunk(2, 0)[0].mean(0))


def _backwards(self: Piece, x: Tensor) -> Tensor:
    return x + 0.1 * x[torch.arange(x.shape[0] - 1, -1, -1)]


def _by_a_value(self: Piece, x: Tensor) -> Tensor:
    if x.mean() > _POSITIVE:
        x = x - x.mean(0)
    return self.layer(x)


def _by_a_loop(self: Piece, x: Tensor) -> Tensor:
    while x.norm() > 2.0:
        x = x / 2
    return self.layer(x)


def _by_numpy(self: Piece, x: Tensor) -> Tensor:
    order = torch.from_numpy(x.detach().mean((1, 2)).numpy().argsort())
    return self.layer(x) + x[order]


def _rows_of_a_mask(self: Piece, x: Tensor) -> Tensor:
    chosen = (x.mean((1, 2)) > _POSITIVE).nonzero().squeeze(1)
    return x.index_add(0, chosen, self.layer(x[chosen]))


def _two_views(self: Piece, x: Tensor) -> Tensor:
    one, other = self.layer(torch.cat([x, x.flip(0)])).chunk(2)
    return x + one * other.sigmoid()


def _packed(self: Piece, x: Tensor) -> Tensor:
    lengths = (x.detach().mean((1, 2)) > _POSITIVE).long() + TOKENS - 1
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return x + pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=TOKENS)[0]


def _slope(self: Piece, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Down an energy's slope, as the piece asks for it itself."""
    x = x if x.requires_grad else x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(reduce(torch.tanh(self.layer(x)).square()), x, create_graph=True)
    return x - 0.1 * slope


def _seeded(self: Piece, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return self.layer(x) + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def _torch_seeded(self: Piece, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return self.layer(x) + 0.1 * torch.randn_like(x)


SEPARATE: dict[str, Step] = {
    "linear": lambda self, x: x + functional.gelu(self.layer(x)),
    "layer norm": lambda self, x: self.layer(x) * 2,
    "group norm": _channels_first,
    "instance norm": lambda self, x: functional.instance_norm(x) + self.layer(x),
    "fixed batch norm": lambda self, x: self.layer(x.transpose(1, 2)).transpose(1, 2),
    "batch norm": lambda self, x: self.layer(x.transpose(1, 2)).transpose(1, 2),
    "attention": lambda self, x: x + self.layer(x, x, x, need_weights=False)[0],
    "heads": _heads,
    "causal": _causal,
    "time first": _time_first,
    "rows": lambda self, x: self.layer(x.reshape(-1, WIDTH)).view(x.shape[0], -1, WIDTH),
    "recurrent": lambda self, x: self.layer(x)[0],
    "packed": _packed,
    "convolution": _channels_first,
    "token mean": lambda self, x: self.layer(x) - x.mean(1, keepdim=True),
    "token softmax": lambda self, x: self.layer(x) * x.softmax(1),
    "token sort": lambda self, x: self.layer(x) + x.sort(1)[0],
    "token roll": lambda self, x: self.layer(x) + x.roll(1, 1),
    "class token": _class_token,
    "picked": _picked,
    "dropout": lambda self, x: functional.dropout(self.layer(x), 0.0, self.training),
    "chunks": lambda self, x: torch.cat([part * 2 for part in self.layer(x).chunk(2, -1)], -1),
    "scaled": lambda self, x: x + self.layer(x) * self.alpha,
    "clamped": lambda self, x: self.layer(x).clamp(-1, 1).unsqueeze(1).squeeze(1),
    "off": lambda self, x: self.layer(x) - 0.0 * x.mean(-1, keepdim=True),
    "no gradient": lambda self, x: x + self.layer(x).detach(),
}
# Couple nothing, and are refused between operators.
INSIDE: dict[str, Step] = {"slope": lambda self, x: _slope(self, x, torch.sum)}
COUPLING: dict[str, Step] = {
    "mean taken off": lambda self, x: self.layer(x) - x.mean(0),
    "mean by alpha": lambda self, x: self.layer(x) - self.alpha * x.mean(0),
    "small coupling": lambda self, x: self.layer(x) + 1e-4 * x.softmax(0),
    "functional batch norm": lambda self, x: functional.batch_norm(
        self.layer(x).transpose(1, 2), None, None, training=True
    ).transpose(1, 2),
    "smallest": lambda self, x: self.layer(x) - x.min(0)[0],
    "variance": lambda self, x: self.layer(x) / (1 + torch.var_mean(x, 0)[0]),
    "norm": lambda self, x: self.layer(functional.normalize(x, dim=0)),
    "turned": lambda self, x: self.layer(x) + 0.1 * x.roll(2, 0),
    "backwards": _backwards,
    "sorted": lambda self, x: self.layer(x) + x.sort(0)[0],
    "running sum": lambda self, x: self.layer(x) + 0.1 * x.cumsum(0),
    "across": lambda self, x: x + self.layer(x, x, x, need_weights=False)[0],
    "halves": _halves,
    "second": lambda self, x: self.layer(x) + x[1],
    "largest": lambda self, x: self.layer(x) + x.topk(1, dim=0)[0],
    "by size": lambda self, x: self.layer(x) / (x.shape[0] + 1),
    "training only": _training_only,
    "few samples": _few_samples,
    "moving average": _moving_average,
    "slope of mean": lambda self, x: _slope(self, x, torch.mean),
    "seeded noise": _seeded,
    "torch seeded": _torch_seeded,
    "flat norm": lambda self, x: self.layer(x) / x.norm(),
    "by a value": _by_a_value,
    "by a loop": _by_a_loop,
    "by numpy": _by_numpy,
    "rows of a mask": _rows_of_a_mask,
    "two views": _two_views,
}
_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "group norm": lambda: nn.GroupNorm(2, WIDTH),
    "fixed batch norm": lambda: nn.BatchNorm1d(WIDTH).eval(),
    "attention": lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
    "across": lambda: nn.MultiheadAttention(WIDTH, HEADS),
    "packed": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "recurrent": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "convolution": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
}
