"""Layers whose trunk may be shared out along the sequence, each over what another one has not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.layers import TP_PLANS, DecoderLayer, EncoderLayer, LanguageLayer

WIDTH, HEADS, BATCH, DEPTH, WORDS = 8, 4, 2, 3, 13


class Direct(nn.Module):
    """Its maps are its own, its norms have no bias or are written out; a norm of single heads is common to
    them, and a parameter scales what comes out of the first rowwise map. Gives a pair.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.query_norm = nn.LayerNorm(WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.middle = nn.Linear(WIDTH, WIDTH)  # whole, of each position by itself
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(x)
        query = self.query_norm(self.heads(self.query(normed)))
        mixed = functional.scaled_dot_product_attention(
            query, self.heads(self.key(normed)), self.heads(self.value(normed))
        )
        x = x + (1 + self.scale) * self.out(mixed.transpose(1, 2).flatten(2))
        x = torch.tanh(self.middle(x)) + x
        rms = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.down(functional.gelu(self.up(rms))), x


_DIRECT = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise", "up": "colwise"}


class Latent(nn.Module):
    """What its attention is made of goes through a narrow map and a norm that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.norm = nn.RMSNorm(WIDTH)
        self.attention = LatentAttention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class LatentAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, 3, bias=False)
        self.narrow_norm = nn.RMSNorm(3)
        self.query, self.value = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(self.narrow_norm(self.narrow(x))).unflatten(-1, (-1, 2)).transpose(1, 2)
        value = self.value(x).unflatten(-1, (-1, 2)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, query, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


LATENT = {
    "attention.query": "colwise",
    "attention.value": "colwise",
    "attention.out": "rowwise",
}
PLANS: Mapping[type[nn.Module], Mapping[str, str]] = {
    **TP_PLANS,
    Direct: {**_DIRECT, "query_norm": "replicated_with_grad_allreduce", "down": "rowwise"},
    Latent: LATENT,
}
MAKERS: Mapping[str, Any] = {
    "encoder": lambda: EncoderLayer(WIDTH, HEADS),
    "language": lambda: LanguageLayer(WIDTH, HEADS, 2 * WIDTH),
    "direct": Direct,
    "latent": Latent,
}


class Texts(nn.Module):
    """A language model of some layers, between an embedding that is also its head, and a norm."""

    def __init__(self, layers: nn.ModuleList, positions: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(positions, WIDTH))
        self.layers = layers
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.position
        total: Any = 0.0
        for layer in self.layers:
            if isinstance(layer, Direct):
                x, more = layer(x)
                total = total + more.square().mean((1, 2))
            else:
                x = layer(x)
        logits = self.norm(x) @ self.embed.weight.T
        each = functional.cross_entropy(logits.transpose(1, 2), words, reduction="none").mean(1)
        return (each + total).mean()


class Captions(nn.Module):
    """A decoder over an encoder of as many positions, whose last norm is every layer's context."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(EncoderLayer(WIDTH, HEADS) for _ in range(2))
        self.decoder = nn.ModuleList(DecoderLayer(WIDTH, HEADS) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        context = self.embed(words)
        for layer in self.encoder:
            context = layer(context)
        x = self.embed(words.flip(1))
        for layer in self.decoder:
            x = layer(x, context)
        return x.square().mean((1, 2)).mean()


def workload_of(name: str, positions: int) -> Workload:
    """A toy by its name; parameters are drawn, norms' too."""
    torch.manual_seed(0)
    if name == "captions":
        module: nn.Module = Captions(positions)
    else:
        module = Texts(nn.ModuleList(MAKERS[name]() for _ in range(DEPTH)), positions)
    return workload_with(module, positions)


def workload_with(module: nn.Module, positions: int, **settings: Any) -> Workload:
    """A task over a module that takes words."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() < 2:
                parameter.copy_(0.5 + torch.randn(parameter.shape) / 4)
    items = [{"words": torch.randint(WORDS, (positions,))} for _ in range(BATCH)]
    task = Task("task", module, BATCH, items)
    plans: dict[type[nn.Module], Any] = {**PLANS, **settings.pop("tp_plans", {})}
    settings.setdefault("tp_sequence", True)
    held = tuple(cls for cls in plans if any(type(part) is cls for part in module.modules()))
    return Workload("toy", [task], operators=held, tp_plans=plans, tp_vocabulary=None, **settings)
